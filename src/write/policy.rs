//! The sizes that shape a tree, and their place in the table's config.
//!
//! Every writer of a table follows the same policy, so it is kept with the table: one config entry a
//! size, under `fragtree.`. "No level is special": a tree of one leaf, a tree of two levels and the
//! full tree come from the same code with other sizes.

use std::collections::HashMap;

use crate::error::{Error, Result};

/// Prefix of this crate's keys in a table's config.
pub(crate) const CONFIG_PREFIX: &str = "fragtree.";

/// Greatest size of anything a policy shapes, in bytes: an object of it and a quarter more still is
/// below the 1 GiB that readers take by default.
const MAX_OBJECT_BYTES: u64 = 768 << 20;

/// Greatest size of what a policy puts into a manifest, in bytes.
const MAX_MANIFEST_BYTES: u64 = 1 << 30;

/// Sizes that shape a tree. All bytes are of objects and messages as stored.
///
/// A table carries its policy in its config ([`TreePolicy::to_config`],
/// [`TreePolicy::from_config`]), under `fragtree.` and the name of the field.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TreePolicy {
    /// Target size of a leaf. Smaller leaves make a look-up and a flush of one fragment cheaper, and
    /// a full read more requests, of which each costs half a millisecond of decoding whatever its
    /// size. A leaf is divided when it is a quarter over, and joined with a neighbour when it is
    /// three quarters under. Default 128 KiB.
    pub leaf_bytes: u64,
    /// Target size of a child list: that of an interior node, and that of a root before it gets one
    /// more level below it. Default 16 KiB, about 180 children.
    pub node_bytes: u64,
    /// Changes buffered in an interior node before they move on to its children. Default 512 KiB.
    pub buffer_bytes: u64,
    /// Changes buffered in the root before they move on to its children. An inline root is part of
    /// every manifest, so this is written by every commit; a larger one lets scattered changes of a
    /// small table gather before leaves are written. Default 8 KiB.
    pub root_buffer_bytes: u64,
    /// Changes kept beside an external root, which lets a commit use the root again as it is.
    /// Default 4 KiB.
    pub since_root_bytes: u64,
    /// A root up to this size, its buffer included, is kept in the manifest, which saves a request
    /// at every open. Default 24 KiB: with it a manifest is still read by one request.
    pub inline_root_bytes: u64,
    /// Fewer fragments than this are not worth a tree. Default 1,000.
    pub min_fragments: u64,
}

impl Default for TreePolicy {
    fn default() -> Self {
        Self {
            leaf_bytes: 128 << 10,
            node_bytes: 16 << 10,
            buffer_bytes: 512 << 10,
            root_buffer_bytes: 8 << 10,
            since_root_bytes: 4 << 10,
            inline_root_bytes: 24 << 10,
            min_fragments: 1000,
        }
    }
}

/// A field of the policy: its name, and the way to it.
type Field = (&'static str, fn(&mut TreePolicy) -> &mut u64);

/// Every field, in the order of the struct.
const FIELDS: [Field; 7] = [
    ("leaf_bytes", |p| &mut p.leaf_bytes),
    ("node_bytes", |p| &mut p.node_bytes),
    ("buffer_bytes", |p| &mut p.buffer_bytes),
    ("root_buffer_bytes", |p| &mut p.root_buffer_bytes),
    ("since_root_bytes", |p| &mut p.since_root_bytes),
    ("inline_root_bytes", |p| &mut p.inline_root_bytes),
    ("min_fragments", |p| &mut p.min_fragments),
];

impl TreePolicy {
    /// All records in one leaf that every commit writes again, named by a root in the manifest: the
    /// "one sidecar" layout. A second leaf is begun only above 768 MiB.
    pub fn one_sidecar() -> Self {
        Self {
            leaf_bytes: MAX_OBJECT_BYTES,
            buffer_bytes: 0,
            root_buffer_bytes: 0,
            since_root_bytes: 0,
            ..Self::default()
        }
    }

    /// A root of its own over leaves and nothing between, with 8 MiB of recent changes in it: the
    /// "tiered" layout.
    pub fn two_levels() -> Self {
        Self {
            node_bytes: MAX_OBJECT_BYTES,
            root_buffer_bytes: 8 << 20,
            inline_root_bytes: 0,
            ..Self::default()
        }
    }

    /// The policy in a table's config; the default for what the config does not say.
    ///
    /// # Errors
    /// [`Error::InvalidInput`] for a key under `fragtree.` that is none of the policy's, for a value
    /// that is no plain number, and those of [`Self::validate`].
    pub fn from_config(config: &HashMap<String, String>) -> Result<Self> {
        let mut policy = Self::default();
        let mut keys: Vec<_> = config.iter().collect();
        // The same complaint every time, whatever the order of the map.
        keys.sort_unstable();
        for (key, value) in keys {
            let Some(name) = key.strip_prefix(CONFIG_PREFIX) else {
                continue;
            };
            let Some((_, field)) = FIELDS.iter().find(|(known, _)| *known == name) else {
                return Err(Error::invalid(format!(
                    "the table's config has the unknown key {key:?}: the keys of fragtree are {}",
                    known_keys()
                )));
            };
            *field(&mut policy) = value.trim().parse().map_err(|_| {
                Error::invalid(format!(
                    "the table's config has {key} = {value:?}: give a plain number such as {}",
                    field(&mut Self::default())
                ))
            })?;
        }
        policy.validate()?;
        Ok(policy)
    }

    /// The config entries that make every writer of a table follow this policy: one for each size
    /// that differs from the default.
    pub fn to_config(&self) -> Vec<(String, String)> {
        let (mut policy, mut default) = (*self, Self::default());
        FIELDS
            .iter()
            .map(|(name, field)| (name, *field(&mut policy), *field(&mut default)))
            .filter(|(_, value, default)| value != default)
            .map(|(name, value, _)| (format!("{CONFIG_PREFIX}{name}"), value.to_string()))
            .collect()
    }

    /// Checks that a tree can have this shape.
    ///
    /// # Errors
    /// [`Error::InvalidInput`] naming the size that cannot be, and what it can.
    pub fn validate(&self) -> Result<()> {
        let objects = [
            ("leaf_bytes", self.leaf_bytes, 1),
            ("node_bytes", self.node_bytes, 1),
            ("buffer_bytes", self.buffer_bytes, 0),
            ("root_buffer_bytes", self.root_buffer_bytes, 0),
        ];
        for (name, value, least) in objects {
            check_size(name, value, least..=MAX_OBJECT_BYTES)?;
        }
        for (name, value) in [
            ("since_root_bytes", self.since_root_bytes),
            ("inline_root_bytes", self.inline_root_bytes),
        ] {
            check_size(name, value, 0..=MAX_MANIFEST_BYTES)?;
        }
        Ok(())
    }
}

fn check_size(name: &str, value: u64, allowed: std::ops::RangeInclusive<u64>) -> Result<()> {
    if allowed.contains(&value) {
        return Ok(());
    }
    Err(Error::invalid(format!(
        "a tree policy cannot have {CONFIG_PREFIX}{name} = {value}: give {} to {} bytes",
        allowed.start(),
        allowed.end()
    )))
}

fn known_keys() -> String {
    let keys: Vec<_> = FIELDS
        .iter()
        .map(|(name, _)| format!("{CONFIG_PREFIX}{name}"))
        .collect();
    keys.join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(entries: &[(&str, &str)]) -> HashMap<String, String> {
        let owned = |(k, v): &(&str, &str)| (k.to_string(), v.to_string());
        entries.iter().map(owned).collect()
    }

    #[test]
    fn a_policy_survives_the_config() {
        for policy in [
            TreePolicy::default(),
            TreePolicy::one_sidecar(),
            TreePolicy::two_levels(),
        ] {
            policy.validate().expect("a sensible policy");
            let mut kept: HashMap<_, _> = policy.to_config().into_iter().collect();
            kept.insert("lance.auto_cleanup.interval".into(), "20".into());
            assert_eq!(TreePolicy::from_config(&kept).expect("valid"), policy);
        }
        let some = config(&[("fragtree.leaf_bytes", " 5000 ")]);
        let policy = TreePolicy::from_config(&some).expect("valid");
        assert_eq!(policy.leaf_bytes, 5000);
        assert_eq!(policy.node_bytes, TreePolicy::default().node_bytes);
    }

    #[test]
    fn what_a_config_cannot_say_is_named() {
        for (key, value, expected) in [
            ("fragtree.leafbytes", "5", "fragtree.leaf_bytes"),
            ("fragtree.leaf_bytes", "5 KiB", "plain number"),
            ("fragtree.leaf_bytes", "-1", "plain number"),
            ("fragtree.leaf_bytes", "0", "give 1 to"),
            ("fragtree.node_bytes", "99999999999", "give 1 to"),
            ("fragtree.", "1", "fragtree.leaf_bytes"),
        ] {
            let error = TreePolicy::from_config(&config(&[(key, value)])).expect_err("invalid");
            let message = error.to_string();
            assert!(message.contains(expected), "{message}");
        }
    }
}
