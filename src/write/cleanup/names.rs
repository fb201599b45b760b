//! The names of everything that versions reach, as compact as deciding allows.
//!
//! Two sets, and the two mistakes a hash can make are not equally bad. A file whose hash happens to
//! be in *reached* stays although it could go: 64 bits are plenty. A file whose hash happens to be in
//! *released* goes although a commit in progress may need it: that takes 128 bits to be out of the
//! question. Both are keyed by numbers drawn for this run, so nobody can make two names that collide.
//!
//! A name is a path relative to the table. Paths in records are written as readers resolve them.

use std::borrow::Cow;
use std::collections::HashSet;
use std::hash::{BuildHasher, BuildHasherDefault, Hasher, RandomState};

use object_store::path::Path;

/// The hash of one name, or of anything else that is looked up and not kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Key([u64; 2]);

impl Key {
    fn short(self) -> u64 {
        let [_, short] = self.0;
        short
    }

    pub(super) fn to_bytes(self) -> [u8; 16] {
        let [a, b] = self.0;
        (u128::from(a) << 64 | u128::from(b)).to_le_bytes()
    }
}

impl std::hash::Hash for Key {
    fn hash<H: Hasher>(&self, state: &mut H) {
        state.write_u64(self.short());
    }
}

/// Draws keys from bytes.
#[derive(Debug, Clone, Default)]
pub(super) struct Keys([RandomState; 2]);

impl Keys {
    pub(super) fn of(&self, bytes: &[u8]) -> Key {
        Key(self.0.each_ref().map(|key| key.hash_one(bytes)))
    }
}

/// Keys are hashes already.
#[derive(Debug, Default)]
pub(super) struct Plain(u64);

impl Hasher for Plain {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.0 = self.0.rotate_left(8) ^ u64::from(*byte);
        }
    }

    fn write_u64(&mut self, value: u64) {
        self.0 = value;
    }
}

pub(super) type Set<T> = HashSet<T, BuildHasherDefault<Plain>>;

/// What is reached, and what only versions that go name.
#[derive(Debug, Default)]
pub(super) struct Names {
    reached: Set<u64>,
    released: Set<Key>,
}

impl Names {
    /// Notes names that a version which stays needs.
    pub(super) fn reach(&mut self, names: impl IntoIterator<Item = Key>) {
        self.reached.extend(names.into_iter().map(Key::short));
    }

    /// Notes names of a version that goes: no commit in progress can be about to name them first.
    pub(super) fn release(&mut self, names: impl IntoIterator<Item = Key>) {
        for name in names {
            if !self.reached.contains(&name.short()) {
                self.released.insert(name);
            }
        }
    }

    pub(super) fn is_reached(&self, name: Key) -> bool {
        self.reached.contains(&name.short())
    }

    pub(super) fn is_released(&self, name: Key) -> bool {
        self.released.contains(&name)
    }

    /// Names known.
    #[cfg(test)]
    pub(super) fn len(&self) -> (usize, usize) {
        (self.reached.len(), self.released.len())
    }
}

/// The name of what a record calls `path`, below `directory` of the table: as a listing shows it.
/// Most names are that already.
pub(super) fn listed(directory: &str, path: &str) -> String {
    let joined = match directory {
        "" => Cow::Borrowed(path),
        directory => Cow::Owned(format!("{directory}/{path}")),
    };
    let plain = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_' | b'/' | b'.');
    if joined.bytes().all(plain) && !joined.contains("//") && !joined.contains("/.") {
        return joined.into_owned();
    }
    let parts = joined.split('/').filter(|part| !part.is_empty());
    let path = parts.fold(Path::default(), |path, part| path.join(part));
    path.to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reached_name_is_never_released() {
        let keys = Keys::default();
        let [a, b, c] = [&b"a"[..], b"b", b"c"].map(|n| keys.of(n));
        let mut names = Names::default();
        names.reach([a]);
        names.release([a, b]);
        names.reach([b]);
        assert!(names.is_reached(a) && names.is_reached(b) && !names.is_reached(c));
        assert!(names.is_released(b) && !names.is_released(a) && !names.is_released(c));
        assert_eq!(names.len(), (2, 1));
    }

    #[test]
    fn names_are_as_a_listing_shows_them() {
        assert_eq!(listed("data", "a-1.lance"), "data/a-1.lance");
        assert_eq!(listed("", "_bt/leaf/a.lance"), "_bt/leaf/a.lance");
        let odd = Path::from("data").join("a b#c%").join("d.lance");
        assert_eq!(listed("data", "a b#c%/d.lance"), odd.to_string());
    }
}
