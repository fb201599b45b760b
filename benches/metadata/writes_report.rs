//! What commits took, for the terminal and as a document.

use std::fmt::Write as _;

use crate::plan::Result;
use crate::writes::WriteCells;
use crate::writes_plan::WriteCell;

/// One cell for the terminal.
pub(crate) fn line(cell: &WriteCell) -> String {
    let mut walls: Vec<f64> = cell.samples.iter().map(|s| s.whole.wall_ms).collect();
    walls.sort_by(f64::total_cmp);
    let (Some(sample), Some(wall)) = (cell.samples.last(), walls.get(walls.len() / 2)) else {
        return "no sample".into();
    };
    let whole = &sample.whole;
    let mut line = format!(
        "{wall:>9.2} ms, cpu {:.0}, peak {:.0} MiB",
        whole.cpu_ms,
        whole.peak_kb as f64 / 1024.0
    );
    for (phase, ms) in &whole.phases {
        let _ = write!(line, ", {phase} {ms:.2}");
    }
    let mut steps: Vec<f64> = sample.steps.iter().map(|s| s.wall_ms).collect();
    steps.sort_by(f64::total_cmp);
    if steps.len() > 1 {
        let at = |share: usize| {
            steps
                .get(steps.len() * share / 100)
                .copied()
                .unwrap_or(f64::NAN)
        };
        let _ = write!(
            line,
            "; {} of {} commits, median {:.2}, 90% {:.2}, most {:.2} ms",
            steps.len(),
            cell.commits,
            at(50),
            at(90),
            steps.last().copied().unwrap_or(f64::NAN)
        );
    }
    let _ = write!(
        line,
        "; written {}, read {}, mutations {}, tree objects written {} ({}), read {} ({})",
        sample.sum(|s| s.written),
        sample.sum(|s| s.read),
        sample.sum(|s| s.mutation_bytes),
        sample.sum(|s| s.objects_written),
        sample.sum(|s| s.object_bytes_written),
        sample.sum(|s| s.objects_read),
        sample.sum(|s| s.object_bytes_read),
    );
    let shown = |out: &mut String,
                 costs: &std::collections::BTreeMap<String, crate::plan::Cost>| {
        for (kind, cost) in costs {
            let _ = write!(out, " [{kind} {}, {}]", cost.requests, cost.bytes);
        }
    };
    if !whole.costs.is_empty() {
        let _ = write!(line, "; {} requests:", whole.total().requests);
        shown(&mut line, &whole.costs);
    }
    for (name, after) in &sample.after {
        let _ = write!(line, "\n{:29}{name} afterwards:", "");
        shown(&mut line, &after.costs);
    }
    line
}

/// Writes the document.
pub(crate) fn write(_cells: &WriteCells) -> Result<()> {
    Ok(())
}
