//! What commits took: for the terminal, against the targets, and as a document.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs;
use std::path::Path;

use crate::plan::{Cost, Result, Store};
use crate::report::{capitalized, distinct, machine, median, replace_measured, size, time};
use crate::writes::WriteCells;
use crate::writes_plan::{FLAT, Step, WriteCell, WriteWork};
use crate::writes_plots;

const DEFAULT: &str = "default";
/// Sides in the order they are shown; others come after them.
const SIDES: [&str; 4] = [FLAT, "one-sidecar", "two-levels", DEFAULT];

const BIG: &str = "1m_x1";
const WIDE: &str = "100k_x30";
const ONE: &str = "one_x1";

/// A cell's samples in a few numbers.
#[derive(Debug, Clone)]
pub(crate) struct Stat {
    /// Median of opening and all commits, in milliseconds.
    pub wall: f64,
    pub fastest: f64,
    pub slowest: f64,
    /// MiB.
    pub peak: f64,
    pub costs: BTreeMap<String, Cost>,
    pub requests: u64,
    /// Bytes of all commits, those not measured included.
    pub written: f64,
    /// The same of everything read, the opening included once.
    pub read: f64,
    pub mutations: f64,
    pub objects_read: u64,
    pub object_bytes_read: u64,
    /// The commits of one sample.
    pub steps: Vec<Step>,
    pub commits: u32,
    /// How many times the measured commits all of them are.
    pub scale: f64,
}

pub(crate) fn stat(cell: &WriteCell) -> Option<Stat> {
    let sample = cell.samples.last()?;
    let walls = || cell.samples.iter().map(|s| s.whole.wall_ms);
    let peaks = cell.samples.iter().map(|s| s.whole.peak_kb as f64 / 1024.0);
    let scale = f64::from(cell.commits) / (sample.steps.len().max(1) as f64);
    let whole = &sample.whole;
    let put = |kind: &str| kind.starts_with("put");
    let in_commits = sample.sum(|s| s.read) as f64;
    let opening = whole.sum(|kind| !put(kind)).bytes as f64 - in_commits;
    Some(Stat {
        wall: median(walls().collect()),
        fastest: walls().fold(f64::INFINITY, f64::min),
        slowest: walls().fold(0.0, f64::max),
        peak: median(peaks.collect()),
        costs: whole.costs.clone(),
        requests: whole.total().requests,
        written: sample.sum(|s| s.written) as f64 * scale,
        read: opening + in_commits * scale,
        mutations: sample.sum(|s| s.mutation_bytes) as f64 * scale,
        objects_read: sample.sum(|s| s.objects_read),
        object_bytes_read: sample.sum(|s| s.object_bytes_read),
        steps: sample.steps.clone(),
        commits: cell.commits,
        scale,
    })
}

impl Stat {
    pub(crate) fn walls(&self) -> Vec<f64> {
        let mut walls: Vec<f64> = self.steps.iter().map(|s| s.wall_ms).collect();
        walls.sort_by(f64::total_cmp);
        walls
    }

    /// Wall time of the slowest commit, in medians.
    fn slowest_commit(&self) -> (f64, f64) {
        let walls = self.walls();
        let slowest = walls.last().copied().unwrap_or(f64::NAN);
        (slowest, slowest / median(walls))
    }

    fn bytes(&self) -> f64 {
        self.written + self.read
    }
}

fn bytes(number: f64) -> String {
    match number {
        n if n >= 1e10 => format!("{:.1} GB", n / 1e9),
        n if n >= 1e9 => format!("{:.2} GB", n / 1e9),
        // Exact far beyond any size here.
        n => size(format!("{n:.0}").parse().unwrap_or_default()),
    }
}

fn times(ratio: f64) -> String {
    match ratio {
        r if r >= 100.0 => format!("{r:.0}x"),
        r if r >= 10.0 => format!("{r:.1}x"),
        r => format!("{r:.2}x"),
    }
}

/// One cell for the terminal.
pub(crate) fn line(cell: &WriteCell) -> String {
    let Some(stat) = stat(cell) else {
        return "no sample".into();
    };
    let mut line = format!(
        "{:>9.2} ms ({:.2}..{:.2}), peak {:.0} MiB",
        stat.wall, stat.fastest, stat.slowest, stat.peak
    );
    let last = cell.samples.last();
    for (phase, ms) in last.iter().flat_map(|s| &s.whole.phases) {
        let _ = write!(line, ", {phase} {ms:.2}");
    }
    let walls = stat.walls();
    if walls.len() > 1 {
        let (slowest, medians) = stat.slowest_commit();
        let _ = write!(
            line,
            "; {} of {} commits, median {:.2} ms, slowest {slowest:.2} ms ({medians:.1} medians)",
            walls.len(),
            stat.commits,
            median(walls.clone()),
        );
    }
    let _ = write!(
        line,
        "; written {}, read {}, mutations {}, {} tree objects read ({})",
        bytes(stat.written),
        bytes(stat.read),
        bytes(stat.mutations),
        stat.objects_read,
        size(stat.object_bytes_read),
    );
    if !stat.costs.is_empty() {
        let _ = write!(line, "; {} requests: {}", stat.requests, kinds(&stat.costs));
    }
    for (name, after) in last.iter().flat_map(|s| &s.after) {
        let _ = write!(line, "\n{:29}{name}: {}", "", kinds(&after.costs));
    }
    line
}

fn kinds(costs: &BTreeMap<String, Cost>) -> String {
    let kinds: Vec<_> = costs
        .iter()
        .map(|(kind, cost)| match cost.bytes {
            0 => format!("{} {kind}", cost.requests),
            bytes => format!("{} {kind} ({})", cost.requests, size(bytes)),
        })
        .collect();
    kinds.join(", ")
}

/// One target and what was found.
struct Check {
    work: String,
    what: &'static str,
    target: String,
    found: String,
    reached: Option<bool>,
}

pub(crate) struct Report<'a> {
    cells: &'a WriteCells,
}

impl Report<'_> {
    pub(crate) fn get(
        &self,
        table: &str,
        work: WriteWork,
        store: Store,
        side: &str,
    ) -> Option<Stat> {
        self.cells.find(table, work, store, side).and_then(stat)
    }

    /// The sides that were measured.
    pub(crate) fn sides(&self) -> Vec<String> {
        let mut sides: Vec<String> = SIDES.map(str::to_string).into();
        for cell in self.cells.iter() {
            if !sides.contains(&cell.side) {
                sides.push(cell.side.clone());
            }
        }
        sides.retain(|side| self.cells.iter().any(|c| c.side == *side));
        sides
    }

    fn checks(&self) -> Vec<Check> {
        let mut checks = Vec::new();
        self.check_single(WriteWork::Append, (1000.0, 50.0), &mut checks);
        self.check_growth(&mut checks);
        self.check_single(WriteWork::Delete10, (500.0, 50.0), &mut checks);
        self.check_objects(WriteWork::Delete10, 3_000_000, &mut checks);
        self.check_single(WriteWork::Delete100, (500.0, 50.0), &mut checks);
        self.check_objects(WriteWork::Delete100, 20_000_000, &mut checks);
        self.check_backfill(WriteWork::BackfillContiguous, 50.0, &mut checks);
        self.check_backfill(WriteWork::BackfillScattered, 20.0, &mut checks);
        self.check_appends(&mut checks);
        self.check_all(&mut checks);
        checks
    }

    fn check_single(
        &self,
        work: WriteWork,
        (written, wall): (f64, f64),
        checks: &mut Vec<Check>,
    ) -> Option<()> {
        let get = |store, side| self.get(BIG, work, store, side);
        let name = format!("{} of 1M", work.title());
        let mut push = |what, target: String, found, reached| {
            checks.push(Check {
                work: name.clone(),
                what,
                target,
                found,
                reached,
            });
        };
        let (flat, tree) = (get(Store::Counted, FLAT)?, get(Store::Counted, DEFAULT)?);
        let ratio = flat.written / tree.written;
        push(
            "bytes written",
            format!("{written:.0}x fewer"),
            format!(
                "{} → {}, {}",
                bytes(flat.written),
                bytes(tree.written),
                times(ratio)
            ),
            Some(ratio >= written),
        );
        for (what, store, judged) in [
            ("wall", Store::Local, true),
            ("wall, 30 ms a request", Store::Slow, false),
        ] {
            let (Some(flat), Some(tree)) = (get(store, FLAT), get(store, DEFAULT)) else {
                continue;
            };
            let ratio = flat.wall / tree.wall;
            push(
                what,
                format!("{wall:.0}x less"),
                format!(
                    "{} → {}, {}",
                    time(flat.wall),
                    time(tree.wall),
                    times(ratio)
                ),
                Some(ratio >= wall),
            );
            if judged && work == WriteWork::Append {
                let ratio = flat.peak / tree.peak;
                push(
                    "peak memory",
                    "1/10".into(),
                    format!("{:.0} → {:.0} MiB, 1/{ratio:.1}", flat.peak, tree.peak),
                    Some(ratio >= 10.0),
                );
            }
        }
        Some(())
    }

    fn check_objects(&self, work: WriteWork, limit: u64, checks: &mut Vec<Check>) -> Option<()> {
        let tree = self.get(BIG, work, Store::Counted, DEFAULT)?;
        let read: u64 = tree_bytes(&tree.costs);
        checks.push(Check {
            work: format!("{} of 1M", work.title()),
            what: "tree objects read",
            target: format!("under {}", size(limit)),
            found: size(read),
            reached: Some(read < limit),
        });
        Some(())
    }

    fn check_growth(&self, checks: &mut Vec<Check>) -> Option<()> {
        let get = |table, store| self.get(table, WriteWork::Append, store, DEFAULT);
        let (small, large) = (get("10k_x1", Store::Local)?, get(BIG, Store::Local)?);
        let (small_cost, large_cost) = (get("10k_x1", Store::Counted)?, get(BIG, Store::Counted)?);
        let numbers = [
            (
                "wall",
                large.wall / small.wall,
                time(small.wall),
                time(large.wall),
            ),
            (
                "bytes written",
                large_cost.written / small_cost.written,
                bytes(small_cost.written),
                bytes(large_cost.written),
            ),
            (
                "bytes read",
                large_cost.read / small_cost.read,
                bytes(small_cost.read),
                bytes(large_cost.read),
            ),
            (
                "requests",
                large_cost.requests as f64 / small_cost.requests as f64,
                small_cost.requests.to_string(),
                large_cost.requests.to_string(),
            ),
            (
                "peak memory",
                large.peak / small.peak,
                format!("{:.0}", small.peak),
                format!("{:.0} MiB", large.peak),
            ),
        ];
        for (what, growth, before, after) in numbers {
            checks.push(Check {
                work: "append of one fragment, 10K to 1M".into(),
                what,
                target: "within 2x".into(),
                found: format!("{before} → {after}, {}", times(growth)),
                reached: Some(growth <= 2.0),
            });
        }
        Some(())
    }

    fn check_backfill(&self, work: WriteWork, target: f64, checks: &mut Vec<Check>) -> Option<()> {
        let get = |store, side| self.get(WIDE, work, store, side);
        let (flat, tree) = (get(Store::Counted, FLAT)?, get(Store::Counted, DEFAULT)?);
        let name = format!("{}, 1,000 of 100K × 30 a commit", work.title());
        let mut push = |what, target: String, found, reached| {
            checks.push(Check {
                work: name.clone(),
                what,
                target,
                found,
                reached,
            });
        };
        let show = |what: f64, than: f64| {
            format!("{} → {}, {}", bytes(what), bytes(than), times(what / than))
        };
        push(
            "bytes written in all",
            format!("{target:.0}x fewer"),
            show(flat.written, tree.written),
            Some(flat.written / tree.written >= target),
        );
        push(
            "bytes written and read",
            String::new(),
            show(flat.bytes(), tree.bytes()),
            None,
        );
        if let Some(local) = get(Store::Local, DEFAULT) {
            let (slowest, medians) = local.slowest_commit();
            push(
                "slowest commit",
                "at most 5 medians".into(),
                format!("{}, {medians:.1} medians", time(slowest)),
                Some(medians <= 5.0),
            );
            if let Some(flat) = get(Store::Local, FLAT) {
                let (a, b) = (median(flat.walls()), median(local.walls()));
                push(
                    "wall of a commit",
                    String::new(),
                    format!("{} → {}, {}", time(a), time(b), times(a / b)),
                    None,
                );
            }
        }
        Some(())
    }

    fn check_appends(&self, checks: &mut Vec<Check>) -> Option<()> {
        let work = WriteWork::Appends;
        let cell = |side| self.cells.find(ONE, work, Store::Hinted, side);
        let (flat_cell, tree_cell) = (cell(FLAT)?, cell(DEFAULT)?);
        let (flat, tree) = (stat(flat_cell)?, stat(tree_cell)?);
        let name = format!("{} {}", thousands(flat.commits), work.title());
        let ratio = flat.written / tree.written;
        checks.push(Check {
            work: name.clone(),
            what: "bytes written",
            target: "at most 1/50".into(),
            found: format!(
                "{} → {}, 1/{ratio:.1}",
                bytes(flat.written),
                bytes(tree.written)
            ),
            reached: Some(ratio >= 50.0),
        });
        let after = |cell: &WriteCell, name: &str| -> Option<(u64, u64, u64)> {
            let read = cell.samples.last()?.after.get(name)?;
            let data = |kind: &str| kind.contains("data file") || kind.contains("deletion file");
            let metadata = read.sum(|kind| !data(kind));
            Some((
                metadata.requests,
                metadata.bytes,
                read.sum(|kind| kind.starts_with("get tree")).requests,
            ))
        };
        let (grown, converted) = (
            after(tree_cell, "one row")?,
            after(flat_cell, "one row, converted")?,
        );
        checks.push(Check {
            work: name,
            what: "requests to open and find one row",
            target: "as after a conversion, but for height".into(),
            found: format!(
                "{} ({}), after a conversion {} ({})",
                grown.0,
                size(grown.1),
                converted.0,
                size(converted.1)
            ),
            // Each level is one tree object of the path.
            reached: Some(grown.0 - grown.2 <= converted.0 - converted.2),
        });
        Some(())
    }

    fn check_all(&self, checks: &mut Vec<Check>) -> Option<()> {
        let get = |store, side| self.get(BIG, WriteWork::DeleteAll, store, side);
        let (flat, tree) = (get(Store::Local, FLAT)?, get(Store::Local, DEFAULT)?);
        let ratio = tree.wall / flat.wall;
        checks.push(Check {
            work: format!("{} of 1M", WriteWork::DeleteAll.title()),
            what: "wall",
            target: "at most 1.5x".into(),
            found: format!(
                "{} → {}, {}",
                time(flat.wall),
                time(tree.wall),
                times(ratio)
            ),
            reached: Some(ratio <= 1.5),
        });
        Some(())
    }

    // ---- Markdown

    fn markdown(&self) -> String {
        let mut out = String::new();
        let revisions = distinct(self.cells.iter().map(|c| c.revision.clone()));
        let dates = distinct(self.cells.iter().map(|c| c.date.clone()));
        let _ = writeln!(out, "{}\n", machine());
        let _ = writeln!(out, "Measured {dates} at {revisions}.\n");
        out.push_str("## Against the targets\n\nThe tree has the default policy.\n\n");
        out.push_str("| work | what | target | found | reached |\n|---|---|---|---|---|\n");
        for check in self.checks() {
            let reached = match check.reached {
                Some(true) => "yes",
                Some(false) => "**no**",
                None => "",
            };
            let _ = writeln!(
                out,
                "| {} | {} | {} | {} | {reached} |",
                check.work, check.what, check.target, check.found
            );
        }
        out.push_str("\n## Single commits\n\n");
        let tables = ["10k_x1", "100k_x1", BIG];
        for work in [
            WriteWork::Append,
            WriteWork::Delete10,
            WriteWork::Delete100,
            WriteWork::DeleteAll,
        ] {
            self.single_table(&mut out, work, &tables);
        }
        out.push_str("## Many commits\n\n");
        self.series_table(
            &mut out,
            WIDE,
            WriteWork::BackfillContiguous,
            Store::Counted,
        );
        self.series_table(&mut out, WIDE, WriteWork::BackfillScattered, Store::Counted);
        self.series_table(&mut out, ONE, WriteWork::Appends, Store::Hinted);
        self.reading_after(&mut out);
        self.amplification(&mut out);
        self.breakdown(&mut out);
        out
    }

    fn single_table(&self, out: &mut String, work: WriteWork, tables: &[&str]) {
        let mut rows = String::new();
        for table in tables {
            for side in self.sides() {
                let local = self.get(table, work, Store::Local, &side);
                let counted = self.get(table, work, Store::Counted, &side);
                let (Some(local), Some(counted)) = (local, counted) else {
                    continue;
                };
                let slow = self.get(table, work, Store::Slow, &side);
                let slow = slow.map_or_else(String::new, |s| time(s.wall));
                let _ = writeln!(
                    rows,
                    "| {table} | {} | {} ({}..{}) | {slow} | {} | {} | {} | {:.0} MiB |",
                    side_title(&side),
                    time(local.wall),
                    time(local.fastest),
                    time(local.slowest),
                    counted.requests,
                    bytes(counted.written),
                    bytes(counted.read),
                    local.peak
                );
            }
        }
        if rows.is_empty() {
            return;
        }
        let _ = writeln!(out, "### {}\n", capitalized(work.title()));
        out.push_str("| table | side | wall, local | wall, 30 ms a request | requests | written | read | peak memory |\n|---|---|---|---|---|---|---|---|\n");
        let _ = writeln!(out, "{rows}");
    }

    fn series_table(&self, out: &mut String, table: &str, work: WriteWork, store: Store) {
        let mut rows = String::new();
        let mut commits = 0;
        for side in self.sides() {
            let Some(stat) = self.get(table, work, store, &side) else {
                continue;
            };
            commits = stat.commits;
            // Walls of plain local files, where they were taken.
            let local = self.get(table, work, Store::Local, &side);
            let local = local.unwrap_or_else(|| stat.clone());
            let (slowest, medians) = local.slowest_commit();
            let _ = writeln!(
                rows,
                "| {} | {} | {} | {} | {} ({medians:.1} medians) | {:.1} | {} | {} | {:.0} MiB |",
                side_title(&side),
                stat.steps.len(),
                time(local.steps.iter().map(|s| s.wall_ms).sum::<f64>() * local.scale),
                time(median(local.walls())),
                time(slowest),
                stat.requests as f64 / (stat.steps.len().max(1) as f64),
                bytes(stat.written),
                bytes(stat.read),
                local.peak
            );
        }
        if rows.is_empty() {
            return;
        }
        let _ = writeln!(
            out,
            "### {}: {} commits on {table}\n",
            capitalized(work.title()),
            thousands(commits)
        );
        out.push_str("Where fewer commits were measured, totals are those of the measured ones, multiplied.\n\n");
        out.push_str("| side | measured | wall of all | median commit | slowest commit | requests a commit | written | read | peak memory |\n|---|---|---|---|---|---|---|---|---|\n");
        let _ = writeln!(out, "{rows}");
    }

    fn reading_after(&self, out: &mut String) {
        let mut rows = String::new();
        for side in self.sides() {
            let cell = self
                .cells
                .find(ONE, WriteWork::Appends, Store::Hinted, &side);
            let Some(sample) = cell.and_then(|c| c.samples.last()) else {
                continue;
            };
            for (name, after) in &sample.after {
                let _ = writeln!(
                    rows,
                    "| {} | {name} | {} | {} |",
                    side_title(&side),
                    after.total().requests,
                    kinds(&after.costs)
                );
            }
        }
        if rows.is_empty() {
            return;
        }
        out.push_str("### Reading after the appends\n\n| written by | read | requests | of what |\n|---|---|---|---|\n");
        let _ = writeln!(out, "{rows}");
    }

    /// Bytes written for each byte of mutations. The flat side has no mutations and is compared with
    /// those of the default tree.
    fn amplification(&self, out: &mut String) {
        let works = [
            (BIG, WriteWork::Append, Store::Counted),
            (BIG, WriteWork::Delete10, Store::Counted),
            (BIG, WriteWork::Delete100, Store::Counted),
            (BIG, WriteWork::DeleteAll, Store::Counted),
            (WIDE, WriteWork::BackfillContiguous, Store::Counted),
            (WIDE, WriteWork::BackfillScattered, Store::Counted),
            (ONE, WriteWork::Appends, Store::Hinted),
        ];
        let sides = self.sides();
        let _ = writeln!(
            out,
            "## Write amplification of metadata\n\nBytes written, of every kind, for each byte of mutations.\n\n| table | work | mutations | {} |",
            sides
                .iter()
                .map(|s| side_title(s))
                .collect::<Vec<_>>()
                .join(" | ")
        );
        let _ = writeln!(out, "|---|---|---{}|", "|---".repeat(sides.len()));
        for (table, work, store) in works {
            let Some(tree) = self.get(table, work, store, DEFAULT) else {
                continue;
            };
            let _ = write!(
                out,
                "| {table} | {} | {} |",
                work.title(),
                bytes(tree.mutations)
            );
            for side in &sides {
                match self.get(table, work, store, side) {
                    Some(stat) => {
                        let _ = write!(out, " {} |", times(stat.written / tree.mutations));
                    }
                    None => out.push_str(" |"),
                }
            }
            out.push('\n');
        }
        out.push('\n');
    }

    /// Where requests and bytes go.
    fn breakdown(&self, out: &mut String) {
        out.push_str("## Requests by kind\n\n");
        out.push_str("| table | work | side | requests and bytes |\n|---|---|---|---|\n");
        let mut cells: Vec<_> = self
            .cells
            .iter()
            .filter(|c| matches!(c.store, Store::Counted | Store::Hinted))
            .collect();
        cells.sort_by_key(|c| (c.work, c.table.clone(), c.side.clone()));
        for cell in cells {
            let Some(stat) = stat(cell) else { continue };
            let _ = writeln!(
                out,
                "| {} | {} | {} | {} |",
                cell.table,
                cell.work.title(),
                side_title(&cell.side),
                kinds(&stat.costs)
            );
        }
        out.push('\n');
    }
}

fn tree_bytes(costs: &BTreeMap<String, Cost>) -> u64 {
    let tree = costs
        .iter()
        .filter(|(kind, _)| kind.starts_with("get tree"));
    tree.map(|(_, cost)| cost.bytes).sum()
}

/// A side as the document names it.
pub(crate) fn side_title(side: &str) -> String {
    match side {
        FLAT => "Lance, flat".into(),
        DEFAULT => "tree, default".into(),
        other => format!("tree, {other}"),
    }
}

fn thousands(number: u32) -> String {
    match number {
        n if n >= 1000 => format!("{},{:03}", n / 1000, n % 1000),
        n => n.to_string(),
    }
}

/// Writes the measured part of the document and the plots.
pub(crate) fn write(cells: &WriteCells) -> Result<()> {
    let report = Report { cells };
    let docs = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs");
    fs::create_dir_all(&docs)?;
    for (name, svg) in writes_plots::all(&report) {
        fs::write(docs.join(format!("{name}.svg")), svg)?;
    }
    replace_measured(&docs.join("write-benchmarks.md"), &report.markdown())
}
