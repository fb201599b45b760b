//! The session behind the shell: settings, tables, print options.

use std::collections::HashMap;
use std::io::IsTerminal;
use std::path::Path;
use std::sync::Arc;

use datafusion::catalog::SchemaProvider;
use datafusion::config::ConfigOptions;
use datafusion::error::{DataFusionError, Result as DFResult};
use datafusion::execution::runtime_env::RuntimeEnvBuilder;
use datafusion::logical_expr::{CreateMemoryTable, TableType};
use datafusion::prelude::{SessionConfig, SessionContext};
use datafusion::sql::TableReference;
use datafusion::sql::sqlparser::dialect::{Dialect, dialect_from_str};
use datafusion_cli::object_storage::instrumented::InstrumentedObjectStoreRegistry;
use datafusion_cli::print_options::PrintOptions;
use fragtree::write::CreateOptions;
use fragtree::{Engine, TableOptions, VersionRef};

use super::{SqlArgs, script, statement};
use crate::failure::Outcome;

/// A session and how it prints.
pub(crate) struct Shell {
    pub ctx: SessionContext,
    pub print: PrintOptions,
    /// The directory whose tables are the default schema.
    pub directory: Option<Directory>,
}

/// A directory of tables, for making more.
pub(crate) struct Directory {
    uri: String,
    engine: Engine,
    storage: HashMap<String, String>,
    tables: Arc<dyn SchemaProvider>,
}

impl Shell {
    /// Starts a session with the tables that were asked for.
    pub(crate) async fn start(args: &SqlArgs) -> Outcome<Self> {
        let stores = Arc::new(InstrumentedObjectStoreRegistry::new());
        let runtime = RuntimeEnvBuilder::new()
            .with_object_store_registry(Arc::clone(&stores) as _)
            .build_arc()?;
        let ctx = SessionContext::new_with_config_rt(session_config()?, runtime);
        let engine = Engine::new();
        engine.register(&ctx);
        let named = args.tables.iter().map(|table| table.uri.as_str());
        let uris: Vec<_> = named.chain(args.directory.as_deref()).collect();
        let storage = args.storage.of_any(&uris)?;
        let tables = register_directory(args, &storage, &engine, &ctx).await?;
        register_tables(args, &storage, &engine, &ctx).await?;
        let color = std::io::stdout().is_terminal() && std::env::var_os("NO_COLOR").is_none();
        let print = PrintOptions {
            format: args.format,
            quiet: args.quiet,
            maxrows: args.maxrows,
            color,
            instrumented_registry: stores,
        };
        let directory = args.directory.as_ref().zip(tables);
        let directory = directory.map(|(uri, tables)| Directory {
            uri: uri.trim_end_matches('/').to_string(),
            engine,
            storage,
            tables,
        });
        Ok(Self {
            ctx,
            print,
            directory,
        })
    }

    /// Makes a table of the directory.
    pub(crate) async fn create_table(&self, table: CreateMemoryTable) -> DFResult<()> {
        let refused = |why: String| Err(DataFusionError::Plan(why));
        let Some(directory) = &self.directory else {
            return refused("there is no directory to make a table in".to_string());
        };
        let TableReference::Bare { table: name } = &table.name else {
            return refused(format!(
                "{} is not in the directory {}: give a name alone",
                table.name, directory.uri
            ));
        };
        if !table.constraints.is_empty() || !table.column_defaults.is_empty() {
            return refused(format!(
                "constraints and defaults have no meaning for the Lance table {name}"
            ));
        }
        if name.is_empty() || name.contains(['/', '\\']) || name.starts_with('.') {
            return refused(format!(
                "{name:?} cannot be the name of a table of a directory"
            ));
        }
        if self.ctx.table_exist(table.name.clone())? {
            if table.if_not_exists {
                return Ok(());
            }
            if table.or_replace {
                return refused(format!(
                    "{name} is there already, and its history would be lost: use INSERT OVERWRITE {name}"
                ));
            }
            return refused(format!("there is a table {name} already"));
        }
        let rows = self
            .ctx
            .execute_logical_plan(table.input.as_ref().clone())
            .await?
            .execute_stream()
            .await?;
        let uri = format!("{}/{name}.lance", directory.uri);
        let storage = directory.storage.clone();
        directory
            .engine
            .create_table(&uri, rows, CreateOptions::default(), storage)
            .await?;
        Ok(())
    }

    /// Drops a table that was made besides those of the directory; says whether there was one.
    pub(crate) async fn drop_from_directory(&self, name: &TableReference) -> DFResult<bool> {
        let (Some(directory), TableReference::Bare { table }) = (&self.directory, name) else {
            return Ok(false);
        };
        if directory.tables.table_type(table).await? != Some(TableType::Base) {
            return Ok(false);
        }
        Ok(directory.tables.deregister_table(table)?.is_some())
    }

    /// Runs every statement of `text`; the first error stops it.
    pub(crate) async fn run_script(&self, text: &str) -> DFResult<()> {
        for sql in script::split(text, self.dialect()?.as_ref()) {
            statement::run(self, sql).await?;
        }
        Ok(())
    }

    /// Runs every statement of a file; the first error stops it.
    pub(crate) async fn run_file(&self, path: &Path) -> DFResult<()> {
        let text = std::fs::read_to_string(path).map_err(|e| {
            DataFusionError::Execution(format!("cannot read {}: {e}", path.display()))
        })?;
        self.run_script(script::without_shebang(&text)).await
    }

    /// The SQL dialect, which `SET` may change at any time.
    pub(crate) fn dialect(&self) -> DFResult<Box<dyn Dialect>> {
        let state = self.ctx.state();
        let name = &state.config_options().sql_parser.dialect;
        dialect_from_str(name)
            .ok_or_else(|| DataFusionError::Plan(format!("unsupported SQL dialect: {name}")))
    }
}

/// DataFusion's settings, from the environment where they are set there.
fn session_config() -> DFResult<SessionConfig> {
    let mut options = ConfigOptions::from_env()?;
    if std::env::var_os("DATAFUSION_FORMAT_NULL").is_none() {
        options.format.null = "NULL".to_string();
    }
    Ok(SessionConfig::from(options).with_information_schema(true))
}

/// The directory becomes the default schema, so that its tables need no qualifier. It also takes
/// the tables and views that are made besides.
async fn register_directory(
    args: &SqlArgs,
    storage: &HashMap<String, String>,
    engine: &Engine,
    ctx: &SessionContext,
) -> Outcome<Option<Arc<dyn SchemaProvider>>> {
    let Some(directory) = &args.directory else {
        return Ok(None);
    };
    let options = table_options(args, storage, VersionRef::latest());
    let tables = engine.directory_schema(directory, options).await?;
    let state = ctx.state();
    let names = &state.config_options().catalog;
    let catalog = ctx.catalog(&names.default_catalog).ok_or_else(|| {
        DataFusionError::Configuration(format!("no catalog {:?}", names.default_catalog))
    })?;
    catalog.register_schema(&names.default_schema, Arc::clone(&tables))?;
    Ok(Some(tables))
}

fn table_options(
    args: &SqlArgs,
    storage: &HashMap<String, String>,
    reference: VersionRef,
) -> TableOptions {
    TableOptions {
        reference,
        system_columns: args.system_columns.unwrap_or_default(),
        storage_options: storage.clone(),
        refresh: args.refresh,
    }
}

async fn register_tables(
    args: &SqlArgs,
    storage: &HashMap<String, String>,
    engine: &Engine,
    ctx: &SessionContext,
) -> Outcome {
    for table in &args.tables {
        let options = table_options(args, storage, table.reference.clone());
        engine
            .register_table(ctx, &table.name, &table.uri, options)
            .await?;
    }
    Ok(())
}
