//! `cargo xtask`: the project's chores, the same for people and for CI.
//!
//! Lance needs `protoc` to build. Every chore finds one: the `PROTOC` that is set, when it exists, or
//! the one this crate brings along. So a machine with Rust and a C compiler is enough.

use std::env;
use std::ffi::OsString;
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

const HELP: &str = "\
cargo xtask CHORE

  demo [ARGS]       make a table, convert it, compare what queries cost
  test [ARGS]       all tests: unit, whole-table, command line, examples, docs
  run -- ARGS       the fragtree command line
  install [ARGS]    the fragtree command line, optimised, into cargo's bin folder (--features s3)
  example NAME      one of the programs in examples/
  bench [ARGS]      the metadata benchmark, optimised
  env               print `export PROTOC=...`, for eval, to use cargo directly
  ci                everything CI checks
";

fn main() -> ExitCode {
    let mut args = env::args_os().skip(1);
    let chore = args.next().unwrap_or_default();
    let rest: Vec<_> = args.collect();
    let done = match chore.to_str() {
        Some("demo") => demo(&rest),
        Some("test") => test(&rest),
        Some("run") => run(&rest),
        Some("bench") => bench(&rest),
        Some("install") => install(&rest),
        Some("example") => example(&rest),
        Some("env") => print_env(),
        Some("ci") => ci(),
        Some("" | "help" | "--help" | "-h") => {
            print!("{HELP}");
            Ok(ExitCode::SUCCESS)
        }
        _ => {
            eprint!("no chore {}\n\n{HELP}", chore.display());
            Ok(ExitCode::from(2))
        }
    };
    done.unwrap_or_else(|e| {
        eprintln!("xtask: {e}");
        ExitCode::FAILURE
    })
}

fn demo(args: &[OsString]) -> io::Result<ExitCode> {
    let mut all = vec![OsString::from("demo")];
    all.extend_from_slice(without_dashes(args));
    run_binary(&all)
}

fn test(args: &[OsString]) -> io::Result<ExitCode> {
    status(cargo()?.args(["test", "--workspace"]).args(args))
}

fn run(args: &[OsString]) -> io::Result<ExitCode> {
    run_binary(without_dashes(args))
}

fn install(args: &[OsString]) -> io::Result<ExitCode> {
    let install = ["install", "--locked", "--path", "."];
    status(cargo()?.args(install).args(without_dashes(args)))
}

fn example(args: &[OsString]) -> io::Result<ExitCode> {
    let run = ["run", "--quiet", "--package", "fragtree", "--example"];
    status(cargo()?.args(run).args(without_dashes(args)))
}

fn bench(args: &[OsString]) -> io::Result<ExitCode> {
    let bench = [
        "bench",
        "--package",
        "fragtree",
        "--bench",
        "metadata",
        "--profile",
        "release",
    ];
    status(cargo()?.args(bench).arg("--").args(without_dashes(args)))
}

fn print_env() -> io::Result<ExitCode> {
    let protoc = protoc()?;
    let quoted = protoc.display().to_string().replace('\'', r"'\''");
    println!("export PROTOC='{quoted}'");
    Ok(ExitCode::SUCCESS)
}

fn ci() -> io::Result<ExitCode> {
    let mut script = Command::new("bash");
    forget_outer_cargo(script.arg(root().join(".ci/run")));
    status(&mut script)
}

fn run_binary(args: &[OsString]) -> io::Result<ExitCode> {
    let run = ["run", "--package", "fragtree", "--bin", "fragtree", "--"];
    status(cargo()?.args(run).args(args))
}

fn cargo() -> io::Result<Command> {
    let cargo = env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let mut command = Command::new(cargo);
    command.env("PROTOC", protoc()?);
    forget_outer_cargo(&mut command);
    Ok(command)
}

/// Takes out what `cargo run` has told this program about its own package. Build scripts that look at
/// these variables (`ring`'s does) would run again, and everything above them be compiled again, each
/// time one changes between a chore and cargo used directly.
fn forget_outer_cargo(command: &mut Command) {
    for (name, _) in env::vars_os() {
        let text = name.to_string_lossy();
        if text.starts_with("CARGO_PKG_") || text.starts_with("CARGO_MANIFEST_") {
            command.env_remove(&name);
        }
    }
}

/// The compiler of protobuf definitions to build with.
fn protoc() -> io::Result<PathBuf> {
    if let Some(set) = env::var_os("PROTOC")
        .map(PathBuf::from)
        .filter(|path| path.is_file())
    {
        return Ok(set);
    }
    protoc_bin_vendored::protoc_bin_path().map_err(|e| io::Error::other(e.to_string()))
}

fn root() -> &'static Path {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    here.parent().unwrap_or(here)
}

fn without_dashes(args: &[OsString]) -> &[OsString] {
    match args.split_first() {
        Some((first, rest)) if first == "--" => rest,
        _ => args,
    }
}

fn status(command: &mut Command) -> io::Result<ExitCode> {
    let program = command.get_program().to_owned();
    let status = command
        .status()
        .map_err(|e| io::Error::new(e.kind(), format!("cannot run {}: {e}", program.display())))?;
    let code = status.code().and_then(|code| u8::try_from(code).ok());
    Ok(code.map_or(ExitCode::FAILURE, ExitCode::from))
}
