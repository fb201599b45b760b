//! Repeating requests that failed for a passing reason.
//!
//! Cloud clients repeat by themselves; this is for what still comes through, and for stores that do
//! not. Only errors that may go away are repeated: an object that is missing stays missing.

use std::time::Duration;

use crate::error::{Error, Result};

/// Repetitions after the first try.
const RETRIES: u32 = 3;
/// Pause before the first repetition; each next one is twice as long.
const FIRST_PAUSE: Duration = Duration::from_millis(50);

/// Runs `request` until it succeeds, fails for good, or has been repeated often enough.
pub(crate) async fn retrying<T, F>(mut request: impl FnMut() -> F) -> Result<T>
where
    F: Future<Output = Result<T>>,
{
    let mut pause = FIRST_PAUSE;
    for _ in 0..RETRIES {
        match request().await {
            Err(Error::Store { object, source }) if passing(&source) => {
                tracing::warn!(%object, %source, "repeating a request");
                tokio::time::sleep(pause).await;
                pause *= 2;
            }
            done => return done,
        }
    }
    request().await
}

fn passing(error: &object_store::Error) -> bool {
    matches!(
        error,
        object_store::Error::Generic { .. } | object_store::Error::JoinError { .. }
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    async fn failing(times: u32, error: fn() -> object_store::Error) -> (Result<u32>, u32) {
        let mut calls = 0;
        let result = retrying(|| {
            calls += 1;
            let call = calls;
            async move {
                if call <= times {
                    Err(Error::store("x", error()))
                } else {
                    Ok(call)
                }
            }
        })
        .await;
        (result, calls)
    }

    fn busy() -> object_store::Error {
        object_store::Error::Generic {
            store: "test",
            source: "503".into(),
        }
    }

    fn missing() -> object_store::Error {
        object_store::Error::NotFound {
            path: "x".into(),
            source: "404".into(),
        }
    }

    #[tokio::test]
    async fn a_passing_error_is_repeated_and_a_lasting_one_is_not() {
        assert!(matches!(failing(2, busy).await, (Ok(3), 3)));
        assert!(matches!(failing(9, busy).await, (Err(_), 4)));
        assert!(matches!(failing(9, missing).await, (Err(_), 1)));
    }
}
