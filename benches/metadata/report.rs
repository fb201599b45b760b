//! Medians, the comparison with the targets, and the documents.

use std::fmt::Write as _;
use std::fs;
use std::path::Path;

use crate::matrix::{Cell, Cells};
use crate::plan::{Cost, Policy, Result, Sample, Side, Store, Work};
use crate::plot::{self, Panel, Series};

const BEGIN: &str = "<!-- measured: begin, written by `cargo xtask bench --docs` -->";
const END: &str = "<!-- measured: end -->";

/// The tables the targets are for.
const BIG: [&str; 2] = ["1m_x1", "100k_x30"];
/// The tables of growing size.
const GROWING: [(&str, f64); 4] = [
    ("1k_x1", 1e3),
    ("10k_x1", 1e4),
    ("100k_x1", 1e5),
    ("1m_x1", 1e6),
];
const FABRICATED: [&str; 5] = ["1k_x1", "10k_x1", "100k_x1", "1m_x1", "100k_x30"];
const REAL: &str = "real_2000";

/// A cell's samples in a few numbers.
#[derive(Debug, Clone)]
pub(crate) struct Stat {
    pub wall: f64,
    pub fastest: f64,
    pub slowest: f64,
    pub cpu: f64,
    /// MiB.
    pub peak: f64,
    /// MiB at the end that are not the program's.
    pub own: f64,
    pub cost: Cost,
    pub sample: Sample,
}

pub(crate) fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    let at = |i: usize| values.get(i).copied().unwrap_or(f64::NAN);
    let half = values.len() / 2;
    if values.len() % 2 == 1 {
        at(half)
    } else {
        f64::midpoint(at(half.saturating_sub(1)), at(half))
    }
}

fn stat(cell: &Cell) -> Option<Stat> {
    let walls = || cell.samples.iter().map(|s| s.wall_ms);
    let mebibytes = |kb: fn(&Sample) -> u64| -> Vec<f64> {
        let samples = cell.samples.iter();
        samples.map(|s| kb(s) as f64 / 1024.0).collect()
    };
    let last = cell.samples.last()?;
    Some(Stat {
        wall: median(walls().collect()),
        fastest: walls().fold(f64::INFINITY, f64::min),
        slowest: walls().fold(0.0, f64::max),
        cpu: median(cell.samples.iter().map(|s| s.cpu_ms).collect()),
        peak: median(mebibytes(|s| s.peak_kb)),
        own: median(mebibytes(|s| s.own_kb)),
        cost: last.total(),
        sample: last.clone(),
    })
}

/// One cell for the terminal.
pub(crate) fn line(cell: &Cell) -> String {
    let Some(stat) = stat(cell) else {
        return "no sample".into();
    };
    let mut line = format!(
        "{:>9.2} ms ({:.2}..{:.2}), cpu {:.2}, peak {:.0} MiB",
        stat.wall, stat.fastest, stat.slowest, stat.cpu, stat.peak
    );
    for (phase, ms) in &stat.sample.phases {
        let _ = write!(line, ", {phase} {ms:.2}");
    }
    if stat.cost.requests > 0 {
        let _ = write!(
            line,
            "; {} requests, {} bytes:",
            stat.cost.requests, stat.cost.bytes
        );
        for (kind, cost) in &stat.sample.costs {
            let _ = write!(line, " [{kind} {}, {}]", cost.requests, cost.bytes);
        }
    }
    line
}

struct Report<'a> {
    cells: &'a Cells,
    policy: String,
}

/// One target and what was found.
struct Check {
    table: String,
    work: &'static str,
    what: &'static str,
    target: String,
    found: String,
    reached: Option<bool>,
}

impl Report<'_> {
    fn get(&self, table: &str, work: Work, store: Store, side: Side) -> Option<Stat> {
        self.cells
            .find(table, work, store, side, &self.policy)
            .and_then(stat)
    }

    /// What the conversion of a table said about its tree.
    fn tree(&self, table: &str, field: &str) -> Option<u64> {
        let report = self.get(table, Work::Convert, Store::Local, Side::Tree)?;
        let report: serde_json::Value = serde_json::from_str(&report.sample.answer).ok()?;
        report.get(field)?.as_u64()
    }

    fn checks(&self) -> Vec<Check> {
        let mut checks = Vec::new();
        for table in BIG {
            self.check_count(table, &mut checks);
            self.check_point(table, &mut checks);
            self.check_range(table, &mut checks);
            self.check_stream(table, &mut checks);
        }
        self.check_prototype(&mut checks);
        self.check_growth(&mut checks);
        self.check_real(&mut checks);
        checks
    }

    /// The ratios that most workloads share: flat against tree.
    fn check_ratios(
        &self,
        table: &str,
        (work, title): (Work, &'static str),
        (wall, bytes): (f64, f64),
        checks: &mut Vec<Check>,
    ) -> Option<(Stat, Stat)> {
        let local = |side| self.get(table, work, Store::Local, side);
        let counted = |side| self.get(table, work, Store::Counted, side);
        let (flat, tree) = (local(Side::Lance)?, local(Side::Tree)?);
        let (flat_cost, tree_cost) = (counted(Side::Lance)?, counted(Side::Tree)?);
        let mut push = |what, target: String, found: String, reached| {
            checks.push(Check {
                table: table.to_string(),
                work: title,
                what,
                target,
                found,
                reached: Some(reached),
            });
        };
        let found = flat.wall / tree.wall;
        push(
            "wall",
            format!("{wall:.0}x less"),
            format!("{} → {}, {found:.0}x", time(flat.wall), time(tree.wall)),
            found >= wall,
        );
        let found = flat_cost.cost.bytes as f64 / tree_cost.cost.bytes.max(1) as f64;
        push(
            "bytes",
            format!("{bytes:.0}x less"),
            format!(
                "{} → {}, {found:.0}x",
                size(flat_cost.cost.bytes),
                size(tree_cost.cost.bytes)
            ),
            found >= bytes,
        );
        let found = flat.peak / tree.peak;
        push(
            "peak memory",
            "1/10".into(),
            format!("{:.0} → {:.0} MiB, 1/{found:.1}", flat.peak, tree.peak),
            found >= 10.0,
        );
        if work == Work::Count {
            let found = flat.own / tree.own;
            checks.push(Check {
                table: table.to_string(),
                work: title,
                what: "memory at the end that is not the program's",
                target: String::new(),
                found: format!("{:.0} → {:.1} MiB, 1/{found:.1}", flat.own, tree.own),
                reached: None,
            });
        }
        Some((tree, tree_cost))
    }

    fn check_count(&self, table: &str, checks: &mut Vec<Check>) {
        let name = "open and `COUNT(*)`";
        let Some((_, cost)) =
            self.check_ratios(table, (Work::Count, name), (200.0, 1000.0), checks)
        else {
            return;
        };
        let hinted = self.get(table, Work::Count, Store::Hinted, Side::Tree);
        let hinted = hinted.map_or(0, |h| h.cost.requests);
        checks.push(Check {
            table: table.to_string(),
            work: name,
            what: "requests",
            target: "at most 3".into(),
            found: format!(
                "{} ({hinted} where a version hint is used)",
                cost.cost.requests
            ),
            reached: Some(cost.cost.requests <= 3 && hinted <= 3),
        });
    }

    /// Requests for metadata: neither data nor deletion files.
    fn metadata(stat: &Stat) -> Cost {
        stat.sample
            .sum(|kind| !kind.contains("data file") && !kind.contains("deletion file"))
    }

    fn check_requests(
        &self,
        table: &str,
        title: &'static str,
        cost: &Stat,
        paths: u64,
        checks: &mut Vec<Check>,
    ) {
        let count = self.get(table, Work::Count, Store::Counted, Side::Tree);
        let (Some(count), Some(height)) = (count, self.tree(table, "height")) else {
            return;
        };
        let limit = count.cost.requests + paths * height;
        let found = Self::metadata(cost);
        let data = cost.cost.requests - found.requests;
        checks.push(Check {
            table: table.to_string(),
            work: title,
            what: "requests",
            target: format!("at most {limit} for metadata"),
            found: format!("{} and {data} for data", found.requests),
            reached: Some(found.requests <= limit),
        });
    }

    fn check_point(&self, table: &str, checks: &mut Vec<Check>) {
        let name = "open and one row by address";
        let Some((_, cost)) = self.check_ratios(table, (Work::Point, name), (100.0, 200.0), checks)
        else {
            return;
        };
        self.check_requests(table, name, &cost, 1, checks);
        let objects = cost.sample.sum(|kind| kind.contains("tree")).bytes;
        checks.push(Check {
            table: table.to_string(),
            work: name,
            what: "tree objects",
            target: "under 300 KB at 1M".into(),
            found: format!(
                "{}, {} with the manifest",
                size(objects),
                size(Self::metadata(&cost).bytes)
            ),
            reached: (table == "1m_x1").then_some(objects < 300_000),
        });
    }

    fn check_range(&self, table: &str, checks: &mut Vec<Check>) {
        let name = "open and a range of 10 fragments";
        let Some((_, cost)) = self.check_ratios(table, (Work::Range, name), (50.0, 50.0), checks)
        else {
            return;
        };
        // Ten neighbours lie in at most two leaves, as long as leaves hold ten records.
        self.check_requests(table, name, &cost, 2, checks);
    }

    fn check_stream(&self, table: &str, checks: &mut Vec<Check>) -> Option<()> {
        let local = |work, side| self.get(table, work, Store::Local, side);
        let counted = |side| self.get(table, Work::Records, Store::Counted, side);
        let (flat, tree) = (
            local(Work::Records, Side::Lance)?,
            local(Work::Records, Side::Tree)?,
        );
        let handles = local(Work::Handles, Side::Tree)?;
        let (flat_cost, tree_cost) = (counted(Side::Lance)?, counted(Side::Tree)?);
        let mut push = |what, target: String, found: String, reached| {
            checks.push(Check {
                table: table.to_string(),
                work: "every fragment record, streamed",
                what,
                target,
                found,
                reached: Some(reached),
            });
        };
        let share = tree.wall / flat.wall;
        push(
            "wall",
            "1/3 of the flat open".into(),
            format!(
                "{} → {}, {share:.2} ({} without building records)",
                time(flat.wall),
                time(tree.wall),
                time(handles.wall)
            ),
            share <= 1.0 / 3.0,
        );
        let share = tree_cost.cost.bytes as f64 / flat_cost.cost.bytes as f64;
        push(
            "bytes",
            "0.6".into(),
            format!(
                "{} → {}, {share:.2}",
                size(flat_cost.cost.bytes),
                size(tree_cost.cost.bytes)
            ),
            share <= 0.6,
        );
        let objects = tree_cost.sample.sum(|kind| kind.contains("tree")).requests;
        let expected = self.tree(table, "leaves")? + self.tree(table, "nodes")?;
        push(
            "requests",
            format!("leaves and nodes: {expected}"),
            format!("{objects}"),
            objects <= expected + 1,
        );
        if table == "1m_x1" {
            let smaller = self.get("100k_x1", Work::Records, Store::Local, Side::Tree)?;
            push(
                "peak memory",
                "bounded by the window".into(),
                format!(
                    "{:.0} MiB at 100K, {:.0} MiB at 1M",
                    smaller.peak, tree.peak
                ),
                tree.peak <= smaller.peak * 1.5,
            );
        }
        Some(())
    }

    fn check_prototype(&self, checks: &mut Vec<Check>) -> Option<()> {
        let table = BIG[0];
        let record = self.get(table, Work::Record, Store::Local, Side::Tree)?;
        let cost = self
            .get(table, Work::Record, Store::Counted, Side::Tree)?
            .cost;
        let all = self.get(table, Work::Records, Store::Local, Side::Tree)?;
        let mut push = |work, what, target: &str, found, reached| {
            checks.push(Check {
                table: table.to_string(),
                work,
                what,
                target: target.into(),
                found,
                reached: Some(reached),
            });
        };
        let one = "a prototype's: open and one record";
        push(one, "wall", "6 ms", time(record.wall), record.wall < 6.0);
        push(
            one,
            "bytes",
            "0.8 MB",
            size(cost.bytes),
            cost.bytes < 800_000,
        );
        push(
            "a prototype's: every record",
            "wall",
            "0.7 s",
            time(all.wall),
            all.wall < 700.0,
        );
        Some(())
    }

    fn check_growth(&self, checks: &mut Vec<Check>) {
        for (work, title) in [
            (Work::Count, "10K to 1M: open and `COUNT(*)`"),
            (Work::Point, "10K to 1M: open and one row"),
        ] {
            let at = |table, store| self.get(table, work, store, Side::Tree);
            let (Some(small), Some(large), Some(small_cost), Some(large_cost)) = (
                at("10k_x1", Store::Local),
                at("1m_x1", Store::Local),
                at("10k_x1", Store::Counted),
                at("1m_x1", Store::Counted),
            ) else {
                continue;
            };
            let mut push = |what, target: &str, found, reached| {
                checks.push(Check {
                    table: "x1".into(),
                    work: title,
                    what,
                    target: target.into(),
                    found,
                    reached: Some(reached),
                });
            };
            let wall = large.wall / small.wall;
            push(
                "wall",
                "within 2x",
                format!("{} → {}, {wall:.2}x", time(small.wall), time(large.wall)),
                wall <= 2.0,
            );
            let (a, b) = (small_cost.cost, large_cost.cost);
            let bytes = b.bytes as f64 / a.bytes as f64;
            push(
                "bytes",
                "within 2x",
                format!("{} → {}, {bytes:.2}x", size(a.bytes), size(b.bytes)),
                bytes <= 2.0,
            );
            let height = |table| self.tree(table, "height").unwrap_or_default();
            let more = b.requests.saturating_sub(a.requests);
            push(
                "requests",
                "within + height",
                format!("{} → {}", a.requests, b.requests),
                more <= height("1m_x1"),
            );
            let peak = large.peak / small.peak;
            push(
                "peak memory",
                "within 1.5x",
                format!("{:.0} → {:.0} MiB, {peak:.2}x", small.peak, large.peak),
                peak <= 1.5,
            );
        }
    }

    fn check_real(&self, checks: &mut Vec<Check>) {
        let mut push = |work, found: String, target: &str, reached| {
            checks.push(Check {
                table: REAL.into(),
                work,
                what: "wall",
                target: target.into(),
                found,
                reached: Some(reached),
            });
        };
        for (work, title) in [
            (Work::Scan, "full scan, cold"),
            (Work::WarmScan, "full scan, warm"),
        ] {
            let at = |side| self.get(REAL, work, Store::Local, side);
            let (Some(lance), Some(tree)) = (at(Side::Lance), at(Side::Tree)) else {
                continue;
            };
            let unordered = at(Side::LanceUnordered).map_or(f64::INFINITY, |s| s.wall);
            push(
                title,
                format!(
                    "Lance {} ({} unordered), fragtree {}",
                    time(lance.wall),
                    time(unordered),
                    time(tree.wall)
                ),
                "as fast as Lance",
                tree.wall <= lance.wall.min(unordered),
            );
        }
        for (table, in_turn, at_once, title) in [
            (
                REAL,
                Work::PointsInTurn,
                Work::PointsAtOnce,
                "64 row look-ups",
            ),
            (
                BIG[0],
                Work::CountsInTurn,
                Work::CountsAtOnce,
                "64 range counts at 1M",
            ),
        ] {
            let at = |work| self.get(table, work, Store::Local, Side::Tree);
            let (Some(one), Some(all)) = (at(in_turn), at(at_once)) else {
                continue;
            };
            push(
                title,
                format!(
                    "{} in turn, {} at once ({:.0} and {:.0} MiB)",
                    time(one.wall),
                    time(all.wall),
                    one.peak,
                    all.peak
                ),
                "at once as fast as in turn",
                all.wall <= one.wall,
            );
        }
    }

    // ---- Markdown

    fn markdown(&self) -> String {
        let mut out = String::new();
        let revisions = distinct(self.cells.iter().map(|c| c.revision.clone()));
        let dates = distinct(self.cells.iter().map(|c| c.date.clone()));
        let _ = writeln!(out, "{}\n", machine());
        let _ = writeln!(
            out,
            "Measured {dates} at {revisions}; tree policy `{}`.\n",
            self.policy
        );
        if let Some(nothing) = self.get("1k_x1", Work::Nothing, Store::Local, Side::Tree) {
            let _ = writeln!(
                out,
                "A process with a DataFusion session that touches no table peaks at {:.0} MiB; that is in every figure below.\n",
                nothing.peak
            );
        }
        out.push_str("## Against the targets\n\n");
        out.push_str(
            "| table | work | what | target | found | reached |\n|---|---|---|---|---|---|\n",
        );
        for check in self.checks() {
            let reached = match check.reached {
                Some(true) => "yes",
                Some(false) => "**no**",
                None => "",
            };
            let _ = writeln!(
                out,
                "| {} | {} | {} | {} | {} | {reached} |",
                check.table, check.work, check.what, check.target, check.found
            );
        }
        out.push_str("\n## Everything, local files\n\n");
        out.push_str("Medians, fastest and slowest in brackets.\n\n");
        for work in [
            Work::Count,
            Work::Point,
            Work::Range,
            Work::Record,
            Work::Handles,
            Work::Records,
        ] {
            self.work_table(&mut out, work, &FABRICATED, Store::Local);
        }
        out.push_str("## With 30 ms added to each request\n\n");
        for work in [
            Work::Count,
            Work::Point,
            Work::Range,
            Work::Record,
            Work::Records,
        ] {
            self.work_table(&mut out, work, &FABRICATED, Store::Slow);
        }
        out.push_str("## A real table: 2,000 fragments of 4,000 rows\n\n");
        for work in [
            Work::Scan,
            Work::WarmScan,
            Work::Limit,
            Work::PointsInTurn,
            Work::PointsAtOnce,
        ] {
            self.work_table(&mut out, work, &[REAL], Store::Local);
        }
        for work in [
            Work::Scan,
            Work::Limit,
            Work::PointsInTurn,
            Work::PointsAtOnce,
        ] {
            self.work_table(&mut out, work, &[REAL], Store::Slow);
        }
        self.breakdown(&mut out);
        self.conversions(&mut out);
        out
    }

    fn work_table(&self, out: &mut String, work: Work, tables: &[&str], store: Store) {
        let mut rows = String::new();
        for table in tables {
            for side in Side::ALL {
                let Some(stat) = self.get(table, work, store, side) else {
                    continue;
                };
                let counted = match store {
                    Store::Local => self.get(table, work, Store::Counted, side),
                    _ => Some(stat.clone()),
                };
                let (requests, bytes) = counted.map_or_else(Default::default, |c| {
                    (c.cost.requests.to_string(), size(c.cost.bytes))
                });
                let _ = writeln!(
                    rows,
                    "| {table} | {} | {} ({}..{}) | {requests} | {bytes} | {:.0} MiB |",
                    side.title(),
                    time(stat.wall),
                    time(stat.fastest),
                    time(stat.slowest),
                    stat.peak
                );
            }
        }
        if rows.is_empty() {
            return;
        }
        let slow = if store == Store::Slow {
            ", slow store"
        } else {
            ""
        };
        let _ = writeln!(out, "### {}{slow}\n", capitalized(work.title()));
        out.push_str(
            "| table | side | wall | requests | bytes | peak memory |\n|---|---|---|---|---|---|\n",
        );
        let _ = writeln!(out, "{rows}");
    }

    /// Where requests and bytes go.
    fn breakdown(&self, out: &mut String) {
        out.push_str("## Requests by kind\n\n");
        out.push_str("| table | work | side | requests and bytes |\n|---|---|---|---|\n");
        for table in BIG {
            for work in [Work::Count, Work::Point, Work::Range, Work::Records] {
                for side in [Side::Lance, Side::Tree] {
                    let Some(stat) = self.get(table, work, Store::Counted, side) else {
                        continue;
                    };
                    let kinds: Vec<_> = stat
                        .sample
                        .costs
                        .iter()
                        .map(|(kind, cost)| {
                            format!("{} {kind} ({})", cost.requests, size(cost.bytes))
                        })
                        .collect();
                    let _ = writeln!(
                        out,
                        "| {table} | {} | {} | {} |",
                        work.title(),
                        side.title(),
                        kinds.join(", ")
                    );
                }
            }
        }
        out.push('\n');
    }

    fn conversions(&self, out: &mut String) {
        out.push_str("## Conversion to a tree\n\n");
        out.push_str("| table | wall | peak memory | flat manifest | leaves | nodes | manifest with root |\n|---|---|---|---|---|---|---|\n");
        for table in FABRICATED.into_iter().chain([REAL]) {
            let Some(stat) = self.get(table, Work::Convert, Store::Local, Side::Tree) else {
                continue;
            };
            let field = |name| self.tree(table, name).unwrap_or_default();
            let _ = writeln!(
                out,
                "| {table} | {} | {:.0} MiB | {} | {} of {} in all | {} of {} in all | {} |",
                time(stat.wall),
                stat.peak,
                size(field("source_manifest_bytes")),
                field("leaves"),
                size(field("leaf_bytes")),
                field("nodes"),
                size(field("node_bytes")),
                size(field("manifest_bytes")),
            );
        }
        out.push('\n');
    }

    // ---- plots

    fn bars(&self, title: &str, work: Work, store: Store) -> String {
        let series = Side::MAIN
            .into_iter()
            .map(|side| Series {
                name: side.title().to_string(),
                points: FABRICATED
                    .iter()
                    .map(|table| self.get(table, work, store, side).map(|s| s.wall))
                    .collect(),
            })
            .collect();
        plot::bars(
            title,
            "milliseconds",
            "fragments × data files of each",
            &FABRICATED.map(plain_name),
            series,
        )
    }

    fn growth(&self) -> String {
        let panel = |title: &str, unit: &str, store, value: fn(&Stat) -> f64| Panel {
            title: title.to_string(),
            unit: unit.to_string(),
            series: [
                (Work::Count, Side::Lance, "COUNT(*), Lance flat"),
                (Work::Count, Side::Tree, "COUNT(*), fragtree tree"),
                (Work::Point, Side::Lance, "one row, Lance flat"),
                (Work::Point, Side::Tree, "one row, fragtree tree"),
            ]
            .into_iter()
            .map(|(work, side, name)| Series {
                name: name.to_string(),
                points: GROWING
                    .iter()
                    .map(|(table, _)| self.get(table, work, store, side).map(|s| value(&s)))
                    .collect(),
            })
            .collect(),
        };
        plot::lines(
            "Open and query, by number of fragments",
            "fragments",
            &GROWING.map(|(_, n)| n),
            &[
                panel("Wall time", "milliseconds", Store::Local, |s| s.wall),
                panel("Bytes read", "bytes", Store::Counted, |s| {
                    s.cost.bytes as f64
                }),
                panel("Peak memory", "MiB", Store::Local, |s| s.peak),
            ],
        )
    }
}

fn plain_name(table: &str) -> String {
    table.replace("_x", " × ").to_uppercase()
}

pub(crate) fn distinct(values: impl Iterator<Item = String>) -> String {
    let mut all: Vec<String> = values.collect();
    all.sort();
    all.dedup();
    all.join(", ")
}

pub(crate) fn capitalized(text: &str) -> String {
    let mut chars = text.chars();
    chars.next().map_or_else(String::new, |first| {
        first.to_uppercase().chain(chars).collect()
    })
}

pub(crate) fn time(ms: f64) -> String {
    match ms {
        ms if ms >= 10_000.0 => format!("{:.1} s", ms / 1e3),
        ms if ms >= 1_000.0 => format!("{:.2} s", ms / 1e3),
        ms if ms >= 100.0 => format!("{ms:.0} ms"),
        ms if ms >= 10.0 => format!("{ms:.1} ms"),
        ms => format!("{ms:.2} ms"),
    }
}

pub(crate) fn size(bytes: u64) -> String {
    match bytes as f64 {
        b if b >= 1e8 => format!("{:.0} MB", b / 1e6),
        b if b >= 1e6 => format!("{:.1} MB", b / 1e6),
        b if b >= 1e3 => format!("{:.1} KB", b / 1e3),
        b => format!("{b} B"),
    }
}

pub(crate) fn machine() -> String {
    let read = |path: &str| fs::read_to_string(path).unwrap_or_default();
    let field = |text: &str, name: &str| {
        text.lines()
            .find(|l| l.starts_with(name))
            .and_then(|l| l.split_once(':'))
            .map_or_else(|| "?".to_string(), |(_, v)| v.trim().to_string())
    };
    let cores = std::thread::available_parallelism().map_or(0, usize::from);
    let memory = field(&read("/proc/meminfo"), "MemTotal");
    let memory: f64 = memory.trim_end_matches(" kB").parse().unwrap_or(f64::NAN);
    format!(
        "Machine: {cores} cores ({}), {:.0} GiB of memory, Linux {}. Files are in the page cache: processes are cold, the disk is not.",
        field(&read("/proc/cpuinfo"), "model name"),
        memory / f64::from(1 << 20),
        read("/proc/sys/kernel/osrelease").trim(),
    )
}

/// Writes the measured part of the document and the plots.
pub(crate) fn write(cells: &Cells, policy: Policy) -> Result<()> {
    let report = Report {
        cells,
        policy: policy.label(),
    };
    let docs = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs");
    fs::create_dir_all(&docs)?;
    let plots = [
        (
            "open_count",
            report.bars("Open and COUNT(*)", Work::Count, Store::Local),
        ),
        (
            "point",
            report.bars("Open and one row by address", Work::Point, Store::Local),
        ),
        (
            "range",
            report.bars(
                "Open and a range of 10 fragments",
                Work::Range,
                Store::Local,
            ),
        ),
        (
            "records",
            report.bars("Every fragment record", Work::Records, Store::Local),
        ),
        (
            "slow_point",
            report.bars(
                "Open and one row by address, 30 ms a request",
                Work::Point,
                Store::Slow,
            ),
        ),
        ("growth", report.growth()),
    ];
    for (name, svg) in plots {
        fs::write(docs.join(format!("{name}.svg")), svg)?;
    }
    replace_measured(&docs.join("benchmarks.md"), &report.markdown())
}

/// Puts `measured` between the markers of a page.
pub(crate) fn replace_measured(page: &Path, measured: &str) -> Result<()> {
    let text = fs::read_to_string(page)?;
    let marker = |name| format!("{} has no {name} marker", page.display());
    let (before, rest) = text.split_once(BEGIN).ok_or_else(|| marker("begin"))?;
    let (_, after) = rest.split_once(END).ok_or_else(|| marker("end"))?;
    fs::write(page, format!("{before}{BEGIN}\n\n{measured}{END}{after}"))?;
    Ok(())
}
