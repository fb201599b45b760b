#![allow(dead_code)]
mod error;
mod tree;
pub use error::{Error, Result};
