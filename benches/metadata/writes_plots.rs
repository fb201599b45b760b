//! The plots of the write benchmark.

use crate::plan::Store;
use crate::plot::{self, Panel, Series};
use crate::writes_plan::{FLAT, Step, WriteWork};
use crate::writes_report::{Report, Stat, side_title};

const GROWING: [(&str, f64); 3] = [("10k_x1", 1e4), ("100k_x1", 1e5), ("1m_x1", 1e6)];

/// Every plot, with the name of its file.
pub(crate) fn all(report: &Report<'_>) -> Vec<(&'static str, String)> {
    vec![
        ("write_append", append(report)),
        ("write_deletes", deletes(report)),
        ("write_backfill", backfill(report)),
        ("write_appends", appends(report)),
    ]
}

fn series(report: &Report<'_>, points: impl Fn(&str) -> Vec<Option<f64>>) -> Vec<Series> {
    let sides = report.sides();
    sides
        .iter()
        .map(|side| Series {
            name: side_title(side),
            points: points(side),
        })
        .collect()
}

fn append(report: &Report<'_>) -> String {
    let panel = |title: &str, unit: &str, store, value: fn(&Stat) -> f64| Panel {
        title: title.to_string(),
        unit: unit.to_string(),
        series: series(report, |side| {
            GROWING
                .iter()
                .map(|(table, _)| {
                    let stat = report.get(table, WriteWork::Append, store, side)?;
                    Some(value(&stat))
                })
                .collect()
        }),
    };
    plot::lines(
        "Open and append one fragment, by number of fragments",
        "fragments",
        &GROWING.map(|(_, n)| n),
        &[
            panel("Wall time", "milliseconds", Store::Local, |s| s.wall),
            panel("Bytes written", "bytes", Store::Counted, |s| s.written),
            panel("Peak memory", "MiB", Store::Local, |s| s.peak),
        ],
    )
}

fn deletes(report: &Report<'_>) -> String {
    let works = [
        (WriteWork::Append, "append 1"),
        (WriteWork::Delete10, "10 deletion files"),
        (WriteWork::Delete100, "100 deletion files"),
        (WriteWork::DeleteAll, "1M deletion files"),
    ];
    let groups = works.map(|(_, name)| name.to_string());
    let bars = series(report, |side| {
        works
            .iter()
            .map(|(work, _)| {
                let stat = report.get("1m_x1", *work, Store::Counted, side)?;
                Some(stat.written)
            })
            .collect()
    });
    plot::bars(
        "Bytes written by one commit to a million fragments",
        "bytes",
        "what the commit changes",
        &groups,
        bars,
    )
}

/// A number summed over the first so many commits; those not measured cost what the others did.
fn summed(stat: &Stat, commits: f64, number: fn(&Step) -> f64) -> f64 {
    let measured = stat.steps.len() as f64;
    let (mut sum, mut count) = (0.0, 0.0);
    for step in &stat.steps {
        if count >= commits {
            break;
        }
        sum += number(step);
        count += 1.0;
    }
    if commits > measured {
        sum *= commits / measured;
    }
    sum
}

fn cumulative(
    report: &Report<'_>,
    title: &str,
    (table, work, store): (&str, WriteWork, Store),
    unit: &str,
    xs: &[f64],
    number: fn(&Step) -> f64,
) -> Panel {
    Panel {
        title: title.to_string(),
        unit: unit.to_string(),
        series: series(report, |side| {
            let stat = report.get(table, work, store, side);
            xs.iter()
                .map(|x| Some(summed(stat.as_ref()?, *x, number)))
                .collect()
        }),
    }
}

fn backfill(report: &Report<'_>) -> String {
    let xs = [1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0];
    let of = |title: &str, work, number| {
        let place = ("100k_x30", work, Store::Counted);
        cumulative(report, title, place, "bytes", &xs, number)
    };
    plot::lines(
        "A column filled for 100K × 30, 1,000 fragments a commit",
        "commits",
        &xs,
        &[
            of("Written, neighbours", WriteWork::BackfillContiguous, |s| {
                s.written as f64
            }),
            of("Written, scattered", WriteWork::BackfillScattered, |s| {
                s.written as f64
            }),
            of("Read, scattered", WriteWork::BackfillScattered, |s| {
                s.read as f64
            }),
        ],
    )
}

fn appends(report: &Report<'_>) -> String {
    let (table, work, store) = ("one_x1", WriteWork::Appends, Store::Hinted);
    let commits = report
        .get(table, work, store, FLAT)
        .map_or(10_000, |s| s.commits);
    let mut xs = vec![1.0];
    while let Some(last) = xs.last().copied().filter(|x| *x < f64::from(commits)) {
        xs.push((last * 10.0).min(f64::from(commits)));
    }
    let of = |title: &str, unit: &str, number| {
        cumulative(report, title, (table, work, store), unit, &xs, number)
    };
    plot::lines(
        "One-fragment appends in a row",
        "commits",
        &xs,
        &[
            of("Bytes written in all", "bytes", |s| s.written as f64),
            of("Wall time of all", "milliseconds", |s| s.wall_ms),
        ],
    )
}
