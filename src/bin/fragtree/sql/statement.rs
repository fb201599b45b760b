//! Running one statement and printing what it gives.
//!
//! | statement | runs through | why |
//! |---|---|---|
//! | `CREATE EXTERNAL TABLE … STORED AS LANCE` | the session | `datafusion-cli` checks options against file formats and opens the location with its own store clients |
//! | `DROP TABLE` with `--dir` | the directory | DataFusion swallows the reason why it keeps its tables |
//! | `CREATE TABLE` with `--dir` | the engine | a table of the directory, and not of this session, is meant |
//! | a query, printed as csv, tsv, json or ndjson | the session, row by row | `datafusion-cli` collects, and keeps `--maxrows` rows and a bit |
//! | everything else | `datafusion-cli` | tables, EXPLAIN, SHOW, COPY, other file formats |

use std::io::{self, BufWriter, Write};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use arrow::array::RecordBatch;
use arrow::json::writer::{JsonArray, JsonFormat, LineDelimited};
use arrow::json::{Writer, WriterBuilder};
use datafusion::arrow::datatypes::Schema;
use datafusion::common::instant::Instant;
use datafusion::error::Result as DFResult;
use datafusion::execution::SendableRecordBatchStream;
use datafusion::logical_expr::{DdlStatement, LogicalPlan};
use datafusion::physical_plan::execute_stream;
use datafusion::physical_plan::stream::RecordBatchStreamAdapter;
use datafusion::sql::parser::{DFParser, Statement};
use datafusion::sql::sqlparser::ast;
use datafusion_cli::exec::exec_from_commands;
use datafusion_cli::print_format::PrintFormat;
use datafusion_cli::print_options::{MaxRows, PrintOptions};
use futures::{StreamExt, TryStreamExt};

use super::session::Shell;

/// Runs one statement.
pub(crate) async fn run(shell: &Shell, sql: &str) -> DFResult<()> {
    let mut statements = DFParser::parse_sql_with_dialect(sql, shell.dialect()?.as_ref())?;
    let only = statements.pop_front().filter(|_| statements.is_empty());
    match only {
        Some(statement) if is_lance_table(&statement) => create_table(shell, statement).await,
        Some(statement) if shell.directory.is_some() && is_new_table(&statement) => {
            create_in_directory(shell, statement, sql).await
        }
        Some(statement) if shell.directory.is_some() && is_drop(&statement) => {
            drop_table(shell, statement, sql).await
        }
        Some(statement) if is_query(&statement) && !is_table(shell.print.format) => {
            print_rows(shell, statement).await
        }
        _ => {
            let mut print = shell.print.clone();
            if !is_table(print.format) {
                print.maxrows = MaxRows::Unlimited;
            }
            exec_from_commands(&shell.ctx, vec![sql.to_string()], &print).await
        }
    }
}

fn is_lance_table(statement: &Statement) -> bool {
    matches!(statement, Statement::CreateExternalTable(t) if t.file_type.eq_ignore_ascii_case("lance"))
}

fn is_new_table(statement: &Statement) -> bool {
    matches!(statement, Statement::Statement(s) if matches!(s.as_ref(), ast::Statement::CreateTable(t) if !t.external && !t.temporary))
}

fn is_drop(statement: &Statement) -> bool {
    matches!(statement, Statement::Statement(s) if matches!(s.as_ref(), ast::Statement::Drop { object_type: ast::ObjectType::Table, .. }))
}

/// `DROP TABLE` with `--dir`. A directory says why it keeps its own tables; DataFusion would say that
/// there is none, and with `IF EXISTS` nothing at all.
async fn drop_table(shell: &Shell, statement: Statement, sql: &str) -> DFResult<()> {
    let now = Instant::now();
    let plan = shell.ctx.state().statement_to_plan(statement).await?;
    if let LogicalPlan::Ddl(DdlStatement::DropTable(drop)) = plan
        && shell.drop_from_directory(&drop.name).await?
    {
        return print_done(shell, now);
    }
    exec_from_commands(&shell.ctx, vec![sql.to_string()], &shell.print).await
}

/// `CREATE TABLE` in a directory of Lance tables makes one there.
async fn create_in_directory(shell: &Shell, statement: Statement, sql: &str) -> DFResult<()> {
    let now = Instant::now();
    let plan = shell.ctx.state().statement_to_plan(statement).await?;
    let LogicalPlan::Ddl(DdlStatement::CreateMemoryTable(table)) = plan else {
        return exec_from_commands(&shell.ctx, vec![sql.to_string()], &shell.print).await;
    };
    shell.create_table(table).await?;
    print_done(shell, now)
}

fn is_query(statement: &Statement) -> bool {
    matches!(statement, Statement::Statement(s) if matches!(s.as_ref(), ast::Statement::Query(_)))
}

fn is_table(format: PrintFormat) -> bool {
    matches!(format, PrintFormat::Table | PrintFormat::Automatic)
}

async fn create_table(shell: &Shell, statement: Statement) -> DFResult<()> {
    let now = Instant::now();
    let plan = shell.ctx.state().statement_to_plan(statement).await?;
    shell.ctx.execute_logical_plan(plan).await?;
    print_done(shell, now)
}

fn print_done(shell: &Shell, now: Instant) -> DFResult<()> {
    if is_table(shell.print.format) {
        let state = shell.ctx.state();
        let format = &state.config_options().format;
        shell
            .print
            .print_batches(Arc::new(Schema::empty()), &[], now, 0, format)?;
    }
    Ok(())
}

/// Prints a query's rows as they come. How many there were goes to stderr, so that stdout stays what
/// the format says.
async fn print_rows(shell: &Shell, statement: Statement) -> DFResult<()> {
    let now = Instant::now();
    let plan = shell.ctx.state().statement_to_plan(statement).await?;
    let frame = shell.ctx.execute_logical_plan(plan).await?;
    let task = Arc::new(frame.task_ctx());
    let stream = execute_stream(frame.create_physical_plan().await?, task)?;
    let rows = Arc::new(AtomicU64::new(0));
    let stream = without_empty_batches(stream, Arc::clone(&rows));
    match shell.print.format {
        PrintFormat::Json => write_json::<JsonArray>(stream, "\n").await?,
        PrintFormat::NdJson => write_json::<LineDelimited>(stream, "").await?,
        PrintFormat::Csv | PrintFormat::Tsv | PrintFormat::Table | PrintFormat::Automatic => {
            let quiet = PrintOptions {
                quiet: true,
                ..shell.print.clone()
            };
            let state = shell.ctx.state();
            quiet
                .print_stream(stream, now, &state.config_options().format)
                .await?;
        }
    }
    if !shell.print.quiet {
        let rows = rows.load(Ordering::Relaxed);
        let elapsed = now.elapsed().as_secs_f64();
        eprintln!("{rows} row(s) fetched.\nElapsed {elapsed:.3} seconds.");
    }
    Ok(())
}

/// An empty first batch would cost csv its header.
fn without_empty_batches(
    stream: SendableRecordBatchStream,
    rows: Arc<AtomicU64>,
) -> SendableRecordBatchStream {
    let schema = stream.schema();
    let batches = stream.try_filter(move |batch| {
        rows.fetch_add(batch.num_rows() as u64, Ordering::Relaxed);
        std::future::ready(batch.num_rows() > 0)
    });
    Pin::from(Box::new(RecordBatchStreamAdapter::new(schema, batches)))
}

/// One document for the whole result: an array, `[]` when there are no rows, or an object a line.
/// NULLs are written, so that every object has every column.
async fn write_json<F: JsonFormat>(mut rows: SendableRecordBatchStream, end: &str) -> DFResult<()> {
    let mut out = BufWriter::new(io::stdout().lock());
    let mut writer: Writer<_, F> = WriterBuilder::new()
        .with_explicit_nulls(true)
        .build(&mut out);
    while let Some(batch) = rows.next().await {
        let batch: RecordBatch = batch?;
        writer.write(&batch)?;
    }
    writer.finish()?;
    drop(writer);
    out.write_all(end.as_bytes())?;
    Ok(out.flush()?)
}
