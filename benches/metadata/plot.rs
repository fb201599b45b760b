//! Plots as SVG: bars and lines on a logarithmic scale, nothing else.

use std::fmt::Write as _;

/// One name in the legend, with a value for each place on the x axis.
pub(crate) struct Series {
    pub name: String,
    pub points: Vec<Option<f64>>,
}

/// One of several plots over the same x axis.
pub(crate) struct Panel {
    pub title: String,
    pub unit: String,
    pub series: Vec<Series>,
}

const COLORS: [&str; 4] = ["#b8503c", "#d9a441", "#2f6f9f", "#5b9a68"];
const FONT: &str = "font-family=\"Helvetica, Arial, sans-serif\"";
const INK: &str = "#222222";
const FAINT: &str = "#dddddd";

/// A rectangle with a logarithmic y axis.
struct Frame {
    left: f64,
    top: f64,
    width: f64,
    height: f64,
    /// Powers of ten.
    low: i32,
    high: i32,
}

impl Frame {
    fn around(
        values: impl Iterator<Item = f64>,
        (left, top): (f64, f64),
        (width, height): (f64, f64),
    ) -> Self {
        let (mut low, mut high) = (f64::INFINITY, f64::NEG_INFINITY);
        for value in values.filter(|v| *v > 0.0) {
            low = low.min(value.log10().floor());
            high = high.max(value.log10().ceil());
        }
        if low > high {
            (low, high) = (0.0, 1.0);
        }
        Self {
            left,
            top,
            width,
            height,
            low: power(low),
            high: power(high.max(low + 1.0)),
        }
    }

    fn y(&self, value: f64) -> f64 {
        let low = f64::from(self.low);
        let share = (value.log10() - low) / (f64::from(self.high) - low);
        self.top + self.height * (1.0 - share.clamp(0.0, 1.0))
    }

    fn bottom(&self) -> f64 {
        self.top + self.height
    }

    fn draw(&self, svg: &mut String, unit: &str) {
        for exponent in self.low..=self.high {
            let value = 10f64.powi(exponent);
            let y = self.y(value);
            let _ = writeln!(
                svg,
                "<line x1=\"{:.1}\" y1=\"{y:.1}\" x2=\"{:.1}\" y2=\"{y:.1}\" stroke=\"{FAINT}\"/>",
                self.left,
                self.left + self.width
            );
            text(svg, (self.left - 8.0, y + 4.0), "end", 12, &short(value));
        }
        let middle = self.top + self.height / 2.0;
        let x = self.left - 56.0;
        let _ = writeln!(
            svg,
            "<text x=\"{x:.1}\" y=\"{middle:.1}\" text-anchor=\"middle\" font-size=\"12\" fill=\"{INK}\" transform=\"rotate(-90 {x:.1} {middle:.1})\" {FONT}>{unit}, logarithmic</text>"
        );
        let _ = writeln!(
            svg,
            "<line x1=\"{:.1}\" y1=\"{y:.1}\" x2=\"{:.1}\" y2=\"{y:.1}\" stroke=\"{INK}\"/>",
            self.left,
            self.left + self.width,
            y = self.bottom()
        );
    }
}

/// A whole number as one; values here are exponents of ten.
fn power(value: f64) -> i32 {
    (-30..=30).find(|e| f64::from(*e) >= value).unwrap_or(30)
}

fn text(svg: &mut String, (x, y): (f64, f64), anchor: &str, size: u32, content: &str) {
    let content = content.replace('&', "&amp;").replace('<', "&lt;");
    let _ = writeln!(
        svg,
        "<text x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"{anchor}\" font-size=\"{size}\" fill=\"{INK}\" {FONT}>{content}</text>"
    );
}

/// A value in three digits or so.
fn short(value: f64) -> String {
    let (scaled, suffix) = match value {
        v if v >= 1e9 => (v / 1e9, "G"),
        v if v >= 1e6 => (v / 1e6, "M"),
        v if v >= 1e3 => (v / 1e3, "k"),
        v => (v, ""),
    };
    let digits = match scaled {
        s if s >= 100.0 || s.fract() == 0.0 => 0,
        s if s >= 10.0 => 1,
        _ => 2,
    };
    format!("{scaled:.digits$}{suffix}")
}

fn start(width: f64, height: f64, title: &str) -> String {
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {height}\" width=\"{width}\" height=\"{height}\" role=\"img\">\n<title>{title}</title>\n<rect width=\"{width}\" height=\"{height}\" fill=\"#ffffff\"/>\n"
    );
    text(&mut svg, (24.0, 30.0), "start", 17, title);
    svg
}

fn legend<'a>(svg: &mut String, names: impl Iterator<Item = &'a str>, y: f64) {
    let mut x = 24.0;
    for (name, color) in names.zip(COLORS) {
        let _ = writeln!(
            svg,
            "<rect x=\"{x:.1}\" y=\"{:.1}\" width=\"12\" height=\"12\" fill=\"{color}\"/>",
            y - 10.0
        );
        text(svg, (x + 18.0, y), "start", 13, name);
        x += 42.0 + 7.2 * name.chars().count() as f64;
    }
}

/// Groups of bars, one bar for each series.
pub(crate) fn bars(
    title: &str,
    unit: &str,
    x_label: &str,
    groups: &[String],
    series: Vec<Series>,
) -> String {
    const WIDTH: f64 = 860.0;
    const HEIGHT: f64 = 420.0;
    let mut svg = start(WIDTH, HEIGHT, title);
    legend(&mut svg, series.iter().map(|s| s.name.as_str()), 56.0);
    let values = series
        .iter()
        .flat_map(|s| s.points.iter().copied().flatten());
    let frame = Frame::around(values, (84.0, 84.0), (WIDTH - 108.0, HEIGHT - 140.0));
    frame.draw(&mut svg, unit);
    let group = frame.width / groups.len().max(1) as f64;
    let bar = group * 0.8 / series.len().max(1) as f64;
    for (i, name) in groups.iter().enumerate() {
        let left = frame.left + group * i as f64;
        text(
            &mut svg,
            (left + group / 2.0, frame.bottom() + 20.0),
            "middle",
            13,
            name,
        );
        for (j, (series, color)) in series.iter().zip(COLORS).enumerate() {
            let Some(value) = series.points.get(i).copied().flatten() else {
                continue;
            };
            let x = left + group * 0.1 + bar * j as f64;
            let y = frame.y(value);
            let _ = writeln!(
                svg,
                "<rect x=\"{x:.1}\" y=\"{y:.1}\" width=\"{:.1}\" height=\"{:.1}\" fill=\"{color}\"/>",
                bar - 3.0,
                frame.bottom() - y
            );
            text(
                &mut svg,
                (x + bar / 2.0 - 1.5, y - 5.0),
                "middle",
                11,
                &short(value),
            );
        }
    }
    text(
        &mut svg,
        (frame.left + frame.width / 2.0, HEIGHT - 12.0),
        "middle",
        13,
        x_label,
    );
    svg.push_str("</svg>\n");
    svg
}

/// Panels of lines side by side, over one logarithmic x axis.
pub(crate) fn lines(title: &str, x_label: &str, xs: &[f64], panels: &[Panel]) -> String {
    const PANEL: f64 = 380.0;
    const HEIGHT: f64 = 420.0;
    let width = PANEL * panels.len() as f64;
    let mut svg = start(width, HEIGHT, title);
    if let Some(first) = panels.first() {
        legend(&mut svg, first.series.iter().map(|s| s.name.as_str()), 56.0);
    }
    let span = |xs: &[f64]| {
        let first = xs.first().copied().unwrap_or(1.0).log10();
        (first, xs.last().copied().unwrap_or(10.0).log10() - first)
    };
    let (first, span) = span(xs);
    for (i, panel) in panels.iter().enumerate() {
        let values = panel
            .series
            .iter()
            .flat_map(|s| s.points.iter().copied().flatten());
        let place = (PANEL * i as f64 + 84.0, 108.0);
        let frame = Frame::around(values, place, (PANEL - 116.0, HEIGHT - 172.0));
        frame.draw(&mut svg, &panel.unit);
        text(
            &mut svg,
            (frame.left, frame.top - 14.0),
            "start",
            14,
            &panel.title,
        );
        let at = |x: f64| frame.left + frame.width * (x.log10() - first) / span;
        for x in xs {
            text(
                &mut svg,
                (at(*x), frame.bottom() + 20.0),
                "middle",
                12,
                &short(*x),
            );
        }
        text(
            &mut svg,
            (frame.left + frame.width / 2.0, HEIGHT - 16.0),
            "middle",
            12,
            x_label,
        );
        for (series, color) in panel.series.iter().zip(COLORS) {
            let points: Vec<(f64, f64)> = xs
                .iter()
                .zip(&series.points)
                .filter_map(|(x, value)| Some((at(*x), frame.y((*value)?))))
                .collect();
            let path: Vec<_> = points
                .iter()
                .map(|(x, y)| format!("{x:.1},{y:.1}"))
                .collect();
            let _ = writeln!(
                svg,
                "<polyline points=\"{}\" fill=\"none\" stroke=\"{color}\" stroke-width=\"2\"/>",
                path.join(" ")
            );
            for (x, y) in points {
                let _ = writeln!(
                    svg,
                    "<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"3.5\" fill=\"{color}\"/>"
                );
            }
        }
    }
    svg.push_str("</svg>\n");
    svg
}
