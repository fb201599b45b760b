//! Panics of Lance's decoder that become errors.
//!
//! It asserts in places. A leaf it cannot take is an error of ours all the same, and nothing that
//! anybody needs to read about in a panic's own words.

use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind};

thread_local! {
    static CAUGHT: Cell<bool> = const { Cell::new(false) };
}

/// Whether a panic on this thread would be caught by this crate and become an error: a panic hook may
/// then say nothing.
pub fn panic_is_caught() -> bool {
    CAUGHT.get()
}

/// What `work` returns; nothing when it panics. It must leave nothing half done behind.
pub(crate) fn caught<T>(work: impl FnOnce() -> T) -> Option<T> {
    let before = CAUGHT.replace(true);
    let result = catch_unwind(AssertUnwindSafe(work));
    CAUGHT.set(before);
    result.ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_hook_knows_what_is_caught() {
        assert!(!panic_is_caught());
        assert_eq!(caught(panic_is_caught), Some(true));
        let stopped: Option<()> = caught(|| std::panic::resume_unwind(Box::new("an assertion")));
        assert_eq!(stopped, None);
        assert!(!panic_is_caught());
        let nested = caught(|| {
            caught(|| ());
            panic_is_caught()
        });
        assert_eq!(nested, Some(true));
    }
}
