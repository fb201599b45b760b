//! What histories cost with the default policy: run with `--ignored --nocapture` to judge sizes.

use super::*;

/// What a history wrote and read.
#[derive(Debug, Default)]
struct Cost {
    commits: u64,
    mutation_bytes: u64,
    leaves: u64,
    leaf_bytes: u64,
    nodes: u64,
    node_bytes: u64,
    roots: u64,
    root_bytes: u64,
    manifest_bytes: u64,
    request_bytes: u64,
}

impl Cost {
    fn add(&mut self, report: &GrowthReport) {
        self.commits += 1;
        self.mutation_bytes += report.mutation_bytes;
        self.leaves += report.leaves;
        self.leaf_bytes += report.leaf_bytes;
        self.nodes += report.nodes;
        self.node_bytes += report.node_bytes;
        self.roots += report.roots;
        self.root_bytes += report.roots * report.root_bytes;
        self.manifest_bytes += report.manifest_bytes;
        self.request_bytes += report.request_bytes;
    }

    /// Bytes written for each byte of change: of objects, and with the tree in the manifests.
    fn amplification(&self) -> (f64, f64) {
        let objects = (self.leaf_bytes + self.node_bytes + self.root_bytes) as f64;
        let changes = self.mutation_bytes.max(1) as f64;
        (
            objects / changes,
            (objects + self.manifest_bytes as f64) / changes,
        )
    }

    fn print(&self, what: &str) {
        let (objects, all) = self.amplification();
        println!("{what}: {objects:.1}x objects, {all:.1}x with manifests; {self:?}");
    }
}

/// A fragment as Lance writes one: a file with a random name.
fn fragment(rng: &mut StdRng, id: u32) -> pb::DataFragment {
    pb::DataFragment {
        id: u64::from(id),
        files: vec![data_file(rng)],
        physical_rows: 1 << 20,
        ..Default::default()
    }
}

fn data_file(rng: &mut StdRng) -> pb::DataFile {
    let name = uuid::Uuid::from_u128(rng.random());
    pb::DataFile {
        path: format!("{}.lance", name.simple()),
        fields: (0..4).collect(),
        column_indices: (0..4).collect(),
        file_size_bytes: rng.random_range(1 << 20..1 << 28),
        ..file(0, 0)
    }
}

fn append(rng: &mut StdRng, ids: std::ops::Range<u32>) -> Actions {
    ids.map(|id| (id, Action::Upsert(Box::new(fragment(rng, id)))))
        .collect()
}

/// Files for `count` random fragments of `all`.
fn columns(rng: &mut StdRng, all: u32, count: usize) -> Actions {
    (0..count)
        .map(|_| {
            (
                rng.random_range(0..all),
                Action::AddDataFile(data_file(rng)),
            )
        })
        .collect()
}

async fn appends(policy: TreePolicy, commits: u32) -> Cost {
    let mut rng = StdRng::seed_from_u64(1);
    let mut table = Table::new(policy).await;
    let mut cost = Cost::default();
    for id in 0..commits {
        let actions = append(&mut rng, id..id + 1);
        cost.add(&table.commit(actions).await);
    }
    table.verify().await;
    cost
}

async fn scattered_columns(policy: TreePolicy, fragments: u32, commits: u32, each: usize) -> Cost {
    let mut rng = StdRng::seed_from_u64(1);
    let mut table = Table::new(policy).await;
    let actions = append(&mut rng, 0..fragments);
    table.commit(actions).await;
    let mut cost = Cost::default();
    for _ in 0..commits {
        let actions = columns(&mut rng, fragments, each);
        cost.add(&table.commit(actions).await);
    }
    table.verify().await;
    cost
}

#[tokio::test(flavor = "multi_thread")]
async fn small_commits_write_little() {
    let policy = TreePolicy {
        leaf_bytes: 12 << 10,
        node_bytes: 1 << 10,
        buffer_bytes: 32 << 10,
        ..TreePolicy::default()
    };
    let appended = appends(policy, 400).await;
    appended.print("400 appends");
    // About one flush for each root buffer full, each of one leaf and its path.
    assert!(appended.amplification().0 < 8.0, "{appended:?}");
    assert!(appended.leaves < 40, "{appended:?}");
    let columns = scattered_columns(policy, 1200, 30, 20).await;
    columns.print("30 commits of 20 columns on 1,200");
    assert!(columns.amplification().0 < 40.0, "{columns:?}");
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "minutes: prints figures for judging the default policy"]
async fn figures_of_the_default_policy() {
    let policy = TreePolicy::default();
    let large_root = TreePolicy {
        root_buffer_bytes: 128 << 10,
        since_root_bytes: 16 << 10,
        ..policy
    };
    for (name, policy) in [
        ("default", policy),
        ("root buffer 128 KiB, 16 KiB beside the root", large_root),
    ] {
        let appended = appends(policy, 2000).await;
        appended.print(&format!("{name}, 2,000 appends"));
        let columns = scattered_columns(policy, 20_000, 200, 50).await;
        columns.print(&format!("{name}, 200 commits of 50 columns on 20,000"));
    }
}
