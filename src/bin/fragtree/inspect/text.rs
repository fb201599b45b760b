//! The report of `fragtree inspect` for people.

use super::{Base, Index, Report, Tree};
use crate::output::{self, Align, Facts, Grid};

impl Report {
    /// The report, several lines with tables.
    pub(crate) fn text(&self) -> String {
        let mut facts = Facts::default();
        facts.add("table", self.uri.as_str());
        facts.add("version", format!("{} of {}", self.version, self.timestamp));
        if let Some(branch) = &self.branch {
            facts.add("branch", branch.as_str());
        }
        facts.add("layout", self.layout.as_str());
        let greatest = self
            .max_fragment_id
            .map_or("none".to_string(), |id| id.to_string());
        let fragments = output::grouped(self.fragments);
        facts.add("fragments", format!("{fragments} (greatest id {greatest})"));
        facts.add("rows", self.rows());
        facts.add("columns", self.columns.to_string());
        facts.add("data files", format!("version {}", self.data_file_version));
        facts.add(
            "row ids",
            if self.stable_row_ids {
                "stable"
            } else {
                "addresses"
            },
        );
        let opened = &self.opened;
        facts.add("manifest", output::bytes(opened.manifest_bytes));
        facts.add("opening read", cost(opened.requests, opened.bytes));
        if let Some(tree) = &self.tree {
            facts.add(
                "walking read",
                cost(opened.walk_requests, opened.walk_bytes),
            );
            facts.add("root", tree.root.as_str());
        }
        let mut text = facts.to_string();
        if let Some(tree) = &self.tree {
            text.push_str(&format!(
                "\ntree of height {}\n{}",
                tree.height,
                tree.grid()
            ));
        }
        text.push_str(&self.lists());
        text
    }

    fn rows(&self) -> String {
        match (self.total_rows, self.visible_rows) {
            (Some(total), Some(visible)) if total == visible => output::grouped(total),
            (Some(total), Some(visible)) => format!(
                "{} ({} deleted)",
                output::grouped(visible),
                output::grouped(total.saturating_sub(visible))
            ),
            _ => "unknown: the manifest leaves out row counts".to_string(),
        }
    }

    fn lists(&self) -> String {
        let mut text = String::new();
        let mut list = |title: &str, lines: Vec<String>| {
            if !lines.is_empty() {
                text.push_str(&format!("\n{title}\n"));
                lines
                    .iter()
                    .for_each(|line| text.push_str(&format!("  {line}\n")));
            }
        };
        list("indexes", self.indexes.iter().map(Index::line).collect());
        list(
            "config",
            self.config
                .iter()
                .map(|(k, v)| format!("{k} = {v}"))
                .collect(),
        );
        list(
            "base paths",
            self.base_paths.iter().map(Base::line).collect(),
        );
        text
    }
}

fn cost(requests: u64, bytes: u64) -> String {
    format!(
        "{} in {}",
        output::bytes(bytes),
        output::counted(requests, "request")
    )
}

impl Tree {
    fn grid(&self) -> Grid {
        let right = |name| (name, Align::Right);
        let mut grid = Grid::new(&[
            ("level", Align::Left),
            right("height"),
            right("objects"),
            right("bytes"),
            right("children"),
            right("fragments"),
            right("rows"),
            right("buffered"),
        ]);
        for level in &self.levels {
            grid.row([
                level.kind.to_string(),
                level.height.to_string(),
                output::grouped(level.objects),
                level.bytes.map_or("-".to_string(), output::bytes),
                output::grouped(level.children),
                output::grouped(level.fragments),
                output::grouped(level.visible_rows),
                output::grouped(level.buffered),
            ]);
        }
        grid
    }
}

impl Index {
    fn line(&self) -> String {
        let covers = self.fragments.map_or(String::new(), |n| {
            format!(", covers {}", output::counted(n, "fragment"))
        });
        let columns = self.columns.join(", ");
        format!(
            "{} on ({columns}): {}, of version {}{covers}",
            self.name, self.kind, self.version
        )
    }
}

impl Base {
    fn line(&self) -> String {
        let kind = if self.is_dataset_root {
            "dataset"
        } else {
            "data"
        };
        let name = self
            .name
            .as_ref()
            .map_or(String::new(), |name| format!(" ({name})"));
        format!("{}: {}{name}, {kind}", self.id, self.path)
    }
}
