//! Arguments that several commands share, and the small languages inside them.

use std::collections::HashMap;
use std::path::Path;

use clap::{Args, ValueEnum};
use fragtree::{Engine, OpenOptions, VersionAt, VersionRef, storage_option};
use lance::dataset::refs::check_valid_tag;

use crate::failure::{Failure, Outcome};

/// How a command reports.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum ReportFormat {
    /// For people.
    Text,
    /// One JSON object, for programs.
    Json,
}

/// Options of the object store.
#[derive(Debug, Clone, Args)]
pub(crate) struct StorageArgs {
    /// An option of the object store, as Lance takes it (region, endpoint, credentials);
    /// repeatable.
    #[arg(long = "option", value_name = "KEY=VALUE", value_parser = parse_key_value)]
    options: Vec<(String, String)>,
}

impl StorageArgs {
    /// The options of the store of one table.
    pub(crate) fn of(&self, uri: &str) -> Outcome<HashMap<String, String>> {
        self.of_any(&[uri])
    }

    /// The options of the stores of several tables: each must mean something to one of them.
    pub(crate) fn of_any(&self, uris: &[&str]) -> Outcome<HashMap<String, String>> {
        let mut known = HashMap::new();
        for (key, value) in &self.options {
            let mut names = uris.iter().map(|uri| storage_option(uri, key));
            let first = names.next().ok_or_else(|| {
                Failure::Usage(format!(
                    "--option {key} goes with --table or --dir; a statement has OPTIONS of its own"
                ))
            })?;
            let name = names.fold(first, |found, next| found.or(next));
            known.insert(name?, value.clone());
        }
        Ok(known)
    }
}

/// One version of one table.
#[derive(Debug, Clone, Args)]
pub(crate) struct TargetArgs {
    /// Path or URL of the table.
    pub uri: String,
    /// A version number, a tag, or a timestamp (the last version at or before it). Default: the
    /// latest.
    #[arg(long, value_name = "REF")]
    version: Option<VersionRef>,
    /// A branch, instead of the main one.
    #[arg(long)]
    branch: Option<String>,
    #[command(flatten)]
    storage: StorageArgs,
}

impl TargetArgs {
    /// The version that is meant.
    pub(crate) fn reference(&self) -> Outcome<VersionRef> {
        let mut reference = self.version.clone().unwrap_or_default();
        if self.branch.is_some() && matches!(reference.at, VersionAt::Tag(_)) {
            return Err(Failure::Usage(
                "a tag knows its branch: give --branch or a tag, not both".to_string(),
            ));
        }
        reference.branch.clone_from(&self.branch);
        Ok(reference)
    }

    pub(crate) fn storage_options(&self) -> Outcome<HashMap<String, String>> {
        self.storage.of(&self.uri)
    }

    /// Options to open the version with, sharing what `engine` shares.
    pub(crate) fn open_options(&self, engine: &Engine) -> Outcome<OpenOptions> {
        let options = engine
            .open_options()
            .with_storage_options(self.storage_options()?);
        Ok(options.with_reference(self.reference()?))
    }
}

/// A table to register: `NAME=URI` or `NAME=URI@REF`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct NamedTable {
    /// The name SQL knows it by.
    pub name: String,
    /// Path or URL.
    pub uri: String,
    /// Which version.
    pub reference: VersionRef,
}

impl std::str::FromStr for NamedTable {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (name, location) = text
            .split_once('=')
            .filter(|(name, location)| !name.trim().is_empty() && !location.is_empty())
            .ok_or_else(|| format!("{text:?}: write NAME=URI or NAME=URI@REF"))?;
        let (uri, reference) = split_reference(location);
        Ok(Self {
            name: name.trim().to_string(),
            uri: uri.to_string(),
            reference,
        })
    }
}

/// Splits `URI@REF` at the last `@`: only where a reference can follow, and only when nothing of the
/// whole name exists locally, because file names and user names may hold an `@` too.
fn split_reference(location: &str) -> (&str, VersionRef) {
    let whole = (location, VersionRef::latest());
    let Some((uri, suffix)) = location.rsplit_once('@').filter(|(uri, _)| !uri.is_empty()) else {
        return whole;
    };
    let Ok(reference) = suffix.parse::<VersionRef>() else {
        return whole;
    };
    if let VersionAt::Tag(tag) = &reference.at
        && check_valid_tag(tag).is_err()
    {
        return whole;
    }
    if Path::new(location.strip_prefix("file://").unwrap_or(location)).exists() {
        return whole;
    }
    (uri, reference)
}

fn parse_key_value(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((key, value)) if !key.trim().is_empty() => {
            Ok((key.trim().to_string(), value.to_string()))
        }
        _ => Err(format!("{text:?}: write KEY=VALUE")),
    }
}

/// A size in bytes: a number, or one with a unit (`64k`, `8KiB`, `2 MiB`, `1G`). Units are powers of
/// 1024.
pub(crate) fn parse_bytes(text: &str) -> Result<u64, String> {
    let text = text.trim();
    let digits = text
        .find(|c: char| !c.is_ascii_digit())
        .unwrap_or(text.len());
    let (number, unit) = text.split_at(digits);
    let shift = match unit.trim().to_ascii_lowercase().as_str() {
        "" | "b" => 0,
        "k" | "kb" | "kib" => 10,
        "m" | "mb" | "mib" => 20,
        "g" | "gb" | "gib" => 30,
        _ => {
            return Err(format!(
                "{text:?}: write a number of bytes, or one with KiB, MiB or GiB"
            ));
        }
    };
    let number: u64 = number
        .parse()
        .map_err(|_| format!("{text:?}: no number of bytes"))?;
    number
        .checked_mul(1 << shift)
        .ok_or_else(|| format!("{text:?}: more than 2^64 bytes"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reference(location: &str) -> (String, VersionRef) {
        let (uri, reference) = split_reference(location);
        (uri.to_string(), reference)
    }

    #[test]
    fn splits_versions_tags_and_times() {
        assert_eq!(
            reference("/d/t.lance@7"),
            ("/d/t.lance".into(), VersionRef::version(7))
        );
        assert_eq!(reference("t@v1.0"), ("t".into(), VersionRef::tag("v1.0")));
        let (uri, at) = reference("s3://b/t.lance@2026-01-31 12:00:00");
        assert_eq!(uri, "s3://b/t.lance");
        assert!(matches!(at.at, VersionAt::Timestamp(_)));
    }

    #[test]
    fn keeps_an_at_sign_that_starts_no_reference() {
        for location in [
            "s3://user@bucket/t.lance",
            "/data@home/t",
            "t@",
            "@7",
            "plain",
        ] {
            assert_eq!(reference(location), (location.into(), VersionRef::latest()));
        }
    }

    #[test]
    fn keeps_an_at_sign_of_an_existing_path() {
        let dir = tempfile::tempdir().expect("a scratch folder");
        let path = dir.path().join("t@7");
        std::fs::create_dir(&path).expect("a folder");
        let text = path.to_str().expect("UTF-8");
        assert_eq!(reference(text), (text.into(), VersionRef::latest()));
        let older = format!("{text}@3");
        assert_eq!(reference(&older), (text.into(), VersionRef::version(3)));
    }

    #[test]
    fn names_need_a_location() {
        assert!("t".parse::<NamedTable>().is_err());
        assert!("=x".parse::<NamedTable>().is_err());
        let table: NamedTable = "a=/d/x=y@2".parse().expect("a named table");
        assert_eq!((table.name.as_str(), table.uri.as_str()), ("a", "/d/x=y"));
    }

    #[test]
    fn options_belong_to_a_store() {
        let args = |key: &str| StorageArgs {
            options: vec![(key.into(), "x".into())],
        };
        let s3 = args("aws.region").of("s3://b/t").expect("known");
        assert_eq!(s3.get("region").map(String::as_str), Some("x"));
        assert!(args("region").of("/d/t").is_err());
        assert!(args("region").of_any(&["/d/t", "s3://b/t"]).is_ok());
        assert!(args("regoin").of_any(&["/d/t", "s3://b/t"]).is_err());
        assert!(args("region").of_any(&[]).is_err());
    }

    #[test]
    fn reads_sizes() {
        assert_eq!(parse_bytes("0"), Ok(0));
        assert_eq!(parse_bytes("8KiB"), Ok(8192));
        assert_eq!(parse_bytes("2 m"), Ok(2 << 20));
        for wrong in ["", "k", "1x", "-1", "99999999999999999999", "17179869184g"] {
            assert!(parse_bytes(wrong).is_err(), "{wrong}");
        }
    }
}
