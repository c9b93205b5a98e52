//! `encodle serve`: answers requests over HTTP.

use std::{
    env::VarError,
    fmt, fs, io,
    net::SocketAddr,
    path::{MAIN_SEPARATOR, PathBuf},
    str::FromStr,
    sync::Arc,
    time::Duration,
};

use anyhow::{Result, anyhow, bail};
use clap::{Parser, ValueEnum, builder::BoolishValueParser};
use encoder::{EmbeddingKind, Pooling, PoolingMode, Precision};
use server::{Access, ApiKeys, Embedding, Limits, Model, Models};
use tokio::{
    net::{TcpListener, lookup_host},
    signal::unix::{Signal, SignalKind, signal},
    task::spawn_blocking,
};
use tracing_subscriber::{EnvFilter, Layer, layer::SubscriberExt, util::SubscriberInitExt};

use crate::{
    arguments::{positive, usage_error},
    compute::Machine,
    default_model, messages, model,
};

/// The environment variable with API keys, separated by commas.
const API_KEYS: &str = "ENCODLE_API_KEYS";

#[derive(Parser)]
#[command(after_help = "Examples:
  encodle serve
  encodle serve --model minilm=folder --model ranker=org/name --dtype ranker=int8 --port 8080

Each option can also be set by the environment variable named at the option. A variable for a
repeatable option has one value per line.

GET / is a page to try the models; GET /docs lists the routes.")]
pub struct Args {
    /// Model to serve under NAME: folder, weights file, or org/name@revision on the Hugging Face
    /// hub (@revision is optional). Without NAME, the name is the last component of MODEL,
    /// without @revision; for a symbolic link to a folder, that of the link's target. Repeatable
    /// [default: all-MiniLM-L6-v2]
    #[arg(
        long = "model",
        env = "ENCODLE_MODEL",
        value_delimiter = '\n',
        value_name = "[NAME=]MODEL"
    )]
    models: Vec<Named<String>>,

    /// Number format of matrix products, for the model NAME or for all models: f32, f16, bf16 or
    /// int8. Repeatable [default: f32 on a CPU, f16 on a GPU]
    #[arg(long, env = "ENCODLE_DTYPE", value_delimiter = '\n', value_name = "[NAME=]DTYPE")]
    dtype: Vec<Named<Precision>>,

    /// Pooling modes, separated by commas, for the model NAME or for all models; they replace the
    /// modes of the model's files and make any model an embedding model. Needs --model. Repeatable
    #[arg(
        long,
        env = "ENCODLE_POOLING",
        value_delimiter = '\n',
        value_name = "[NAME=]MODES",
        requires = "models"
    )]
    pooling: Vec<Named<Modes>>,

    /// Kind of embedding, for the model NAME or for all models: dense; sparse, also for a masked
    /// language model whose files name no kind; multi, a vector per token; or all, the three of
    /// BGE-M3 by one model. Repeatable [default: the task that the model's files name]
    #[arg(long, env = "ENCODLE_KIND", value_delimiter = '\n', value_name = "[NAME=]KIND")]
    kind: Vec<Named<EmbeddingKind>>,

    /// Address to listen on, or a name that resolves to one, such as localhost; an IPv4 address is
    /// preferred
    #[arg(long, env = "ENCODLE_HOST", value_name = "ADDRESS", default_value = "127.0.0.1")]
    host: String,

    /// Port to listen on; 0 selects a free port
    #[arg(long, env = "ENCODLE_PORT", default_value_t = 8080)]
    port: u16,

    #[command(flatten)]
    machine: Machine,

    #[command(flatten)]
    limits: LimitArgs,

    /// File of API keys, one per line. The environment variable ENCODLE_API_KEYS adds keys, separated
    /// by commas [default: no keys are required]
    #[arg(long, env = "ENCODLE_API_KEY_FILE", value_name = "FILE")]
    api_key_file: Option<PathBuf>,

    /// Web origin that may use the server from a browser, such as `https://example.org`; * for all.
    /// Repeatable
    #[arg(long, env = "ENCODLE_CORS", value_delimiter = '\n', value_name = "ORIGIN")]
    cors: Vec<String>,

    /// Format of the log on standard error. RUST_LOG selects the level
    #[arg(long, env = "ENCODLE_LOG", value_enum, default_value_t, value_name = "FORMAT")]
    log: LogFormat,
}

#[derive(clap::Args)]
struct LimitArgs {
    /// Maximum number of open connections. While there are as many, a new client waits until one
    /// ends or has been idle for a second; idle connections are closed. Each connection needs an
    /// open file
    #[arg(
        long,
        env = "ENCODLE_MAX_CONNECTIONS",
        value_name = "N",
        default_value_t = Limits::default().max_connections as u64,
        value_parser = positive::<u64>,
    )]
    max_connections: u64,

    /// Maximum number of tokens that are computed together
    #[arg(
        long,
        env = "ENCODLE_MAX_BATCH_TOKENS",
        value_name = "N",
        default_value_t = Limits::default().max_batch_tokens as u64,
        value_parser = positive::<u64>,
    )]
    max_batch_tokens: u64,

    /// Time to wait for more requests before a batch that is not full is computed, in milliseconds
    #[arg(long, env = "ENCODLE_BATCH_DELAY", value_name = "MS", default_value_t = 0)]
    batch_delay: u64,

    /// Maximum number of requests that wait, are computed, or have a response of more than 64 KiB
    /// that is being sent. A request counts after its body has arrived. Further requests are
    /// refused (status 429)
    #[arg(
        long,
        env = "ENCODLE_MAX_REQUESTS",
        value_name = "N",
        default_value_t = Limits::default().max_requests as u64,
        value_parser = positive::<u64>,
    )]
    max_requests: u64,

    /// Maximum memory of the requests in progress, in MiB (16 to 1048576), besides that of the
    /// loaded models. A request that needs more than two fifths of it is refused (status 413); a
    /// request for which there is not enough left waits
    #[arg(
        long,
        env = "ENCODLE_MAX_MEMORY",
        value_name = "MIB",
        default_value_t = (Limits::default().max_memory >> 20) as u64,
        value_parser = clap::value_parser!(u64).range(16..=1 << 20),
    )]
    max_memory: u64,

    /// Refuse a request (status 429) if its estimated wait in the queue is longer than this, in
    /// seconds (0.001 to 86400). The estimate is the number of tokens of other requests that are
    /// ahead of the last text of this request, divided by the measured speed of their models. It
    /// does not include the batch that is being computed [default: as --timeout]
    #[arg(long, env = "ENCODLE_MAX_WAIT", value_name = "SECONDS", value_parser = seconds)]
    max_wait: Option<f64>,

    /// Maximum number of texts per request, at most 1048576
    #[arg(
        long,
        env = "ENCODLE_MAX_TEXTS",
        value_name = "N",
        default_value_t = Limits::default().max_texts as u64,
        value_parser = clap::value_parser!(u64).range(1..=Limits::MAX_TEXTS as u64),
    )]
    max_texts: u64,

    /// Maximum size of a request's body, in MiB (1 to 1024)
    #[arg(
        long,
        env = "ENCODLE_MAX_BODY",
        value_name = "MIB",
        default_value_t = (Limits::default().max_body >> 20) as u64,
        value_parser = clap::value_parser!(u64).range(1..=1024),
    )]
    max_body: u64,

    /// Maximum time from the end of a request's header to its response, in seconds (0.001 to
    /// 86400)
    #[arg(
        long,
        env = "ENCODLE_TIMEOUT",
        value_name = "SECONDS",
        default_value_t = Limits::default().timeout.as_secs_f64(),
        value_parser = seconds,
    )]
    timeout: f64,

    /// Truncate the texts of /v1/embeddings that are longer than the model's maximum length. By
    /// default, this route refuses such texts; the routes of TEI truncate them, unless the request
    /// has `truncate: false`
    #[arg(long, env = "ENCODLE_AUTO_TRUNCATE", value_parser = BoolishValueParser::new())]
    auto_truncate: bool,

    /// Write the bodies of requests, and error messages that may contain texts, to the log
    #[arg(long, env = "ENCODLE_LOG_TEXTS", value_parser = BoolishValueParser::new())]
    log_texts: bool,
}

fn seconds(value: &str) -> Result<f64, String> {
    let parsed = value.parse().ok().filter(|seconds| (0.001..=86_400.0).contains(seconds));
    parsed.ok_or_else(|| "expected a number of seconds from 0.001 to 86400".to_string())
}

impl LimitArgs {
    fn limits(&self) -> Limits {
        let mut limits = Limits::default();
        limits.max_connections = self.max_connections as usize;
        limits.max_batch_tokens = self.max_batch_tokens as usize;
        limits.batch_delay = Duration::from_millis(self.batch_delay);
        limits.max_requests = self.max_requests as usize;
        limits.max_memory = (self.max_memory as usize) << 20;
        limits.max_wait = Duration::from_secs_f64(self.max_wait.unwrap_or(self.timeout));
        limits.max_texts = self.max_texts as usize;
        limits.max_body = (self.max_body as usize) << 20;
        limits.timeout = Duration::from_secs_f64(self.timeout);
        limits.auto_truncate = self.auto_truncate;
        limits.log_texts = self.log_texts;
        limits
    }
}

#[derive(Clone, Copy, Default, ValueEnum)]
enum LogFormat {
    /// One line of text per request
    #[default]
    Text,
    /// One JSON object per request
    Json,
}

/// An argument `[NAME=]VALUE`. Without a name, `--dtype`, `--pooling` and `--kind` apply to all
/// models, and `--model` uses the default name.
#[derive(Clone, Debug, PartialEq)]
struct Named<T> {
    name: Option<String>,
    value: T,
}

impl<T: FromStr> FromStr for Named<T>
where
    T::Err: fmt::Display,
{
    type Err = String;

    fn from_str(argument: &str) -> Result<Self, String> {
        let (name, value) = match argument.split_once('=') {
            Some((name, value)) => (Some(name.to_string()), value),
            None => (None, argument),
        };
        if name.as_deref() == Some("") || value.is_empty() {
            return Err("expected NAME=VALUE or VALUE".to_string());
        }
        Ok(Self { name, value: value.parse().map_err(|error: T::Err| error.to_string())? })
    }
}

#[derive(Clone, Debug, PartialEq)]
struct Modes(Vec<PoolingMode>);

impl FromStr for Modes {
    type Err = encoder::Error;

    fn from_str(modes: &str) -> encoder::Result<Self> {
        modes.split(',').map(str::parse).collect::<Result<_, _>>().map(Self)
    }
}

/// A model to load, with the options that apply to it.
struct Source {
    name: String,
    /// `None` for the default model.
    model: Option<String>,
    dtype: Option<Precision>,
    embedding: Option<Embedding>,
}

impl Args {
    /// The models to load. `--dtype`, `--pooling` and `--kind` with a model's name take precedence
    /// over those without a name; if one is repeated with the same name or without a name, the last
    /// applies.
    fn sources(&self) -> Result<Vec<Source>> {
        let given: Vec<(String, Option<String>)> = match &self.models[..] {
            [] => vec![(default_model::NAME.to_string(), None)],
            models => {
                let named = |Named { name, value }: &Named<String>| {
                    let name = name.clone().unwrap_or_else(|| default_name(value));
                    (name, Some(value.clone()))
                };
                models.iter().map(named).collect()
            }
        };
        let known: Vec<&str> = given.iter().map(|(name, _)| name.as_str()).collect();
        if let Some((_, name)) = (1..).zip(&known).find(|(i, name)| known[*i..].contains(name)) {
            return Err(usage_error(format!(
                "two models have the name {name:?}: expected --model NAME=MODEL with different \
                 names"
            )));
        }
        let dtypes = self.dtype.iter().map(|named| ("--dtype", &named.name));
        let poolings = self.pooling.iter().map(|named| ("--pooling", &named.name));
        let kinds = self.kind.iter().map(|named| ("--kind", &named.name));
        for (option, name) in dtypes.chain(poolings).chain(kinds) {
            if let Some(name) = name.as_deref().filter(|name| !known.contains(name)) {
                let message =
                    format!("{option} names the unknown model {name:?}: expected one of {known:?}");
                return Err(usage_error(message));
            }
        }
        let source = |(name, model): &(String, Option<String>)| {
            Ok(Source {
                name: name.clone(),
                model: model.clone(),
                dtype: value_of(&self.dtype, name).copied(),
                embedding: self.embedding(name)?,
            })
        };
        given.iter().map(source).collect()
    }

    /// The choice of `--pooling` and `--kind` for a model.
    fn embedding(&self, model: &str) -> Result<Option<Embedding>> {
        let kind = value_of(&self.kind, model).copied();
        match (value_of(&self.pooling, model), kind) {
            (None, kind) => Ok(kind.map(Embedding::Kind)),
            (Some(Modes(modes)), None | Some(EmbeddingKind::Dense)) => {
                Ok(Some(Embedding::Pooled(Pooling::new(modes)?)))
            }
            (Some(_), Some(kind)) => Err(usage_error(format!(
                "--pooling has no effect on a {kind} model: leave out --pooling or --kind for \
                 {model:?}"
            ))),
        }
    }

    fn key_sources(&self) -> Result<KeySources> {
        let environment = match std::env::var(API_KEYS) {
            Err(VarError::NotPresent) => None,
            // The original error is dropped, because it contains the keys.
            other => Some(other.map_err(|_| anyhow!("{API_KEYS} is invalid: expected UTF-8"))?),
        };
        Ok(KeySources { file: self.api_key_file.clone(), environment })
    }

    fn access(&self, api_keys: ApiKeys) -> Result<Access> {
        let mut access = Access::default();
        access.api_keys = api_keys;
        let origin = |origin: &String| {
            let value = origin.parse().ok().filter(|_| is_origin(origin));
            value.ok_or_else(|| {
                anyhow!(
                    "--cors {origin:?} is not a web origin: expected *, or a scheme and a host in \
                     lower case without a default port, such as https://example.org"
                )
            })
        };
        access.origins = self.cors.iter().map(origin).collect::<Result<_>>()?;
        Ok(access)
    }
}

/// The sources of the API keys.
struct KeySources {
    file: Option<PathBuf>,
    /// The value of [`API_KEYS`].
    environment: Option<String>,
}

impl KeySources {
    /// Reads the keys.
    fn read(&self) -> Result<ApiKeys> {
        let file = match &self.file {
            None => String::new(),
            Some(path) => fs::read_to_string(path)
                .map_err(|error| anyhow!("{} cannot be read: {error}", path.display()))?,
        };
        let of_environment = self.environment.as_deref().unwrap_or_default().split(',');
        let of_file = file.trim_start_matches('\u{feff}').lines(); // without a byte order mark
        let keys = of_environment.chain(of_file).map(str::trim);
        let invalid =
            |key: &str| Some((key.chars().count(), key.chars().find(|c| !c.is_ascii_graphic())?));
        if let Some((length, got)) = keys.clone().find_map(invalid) {
            // The message does not contain the key.
            bail!(
                "an API key of {length} characters contains {got:?}: expected visible ASCII \
                 characters"
            );
        }
        let keys = ApiKeys::new(keys);
        match (&self.file, &self.environment) {
            (Some(path), _) if keys.is_empty() => {
                bail!("{} has no API keys: expected one per line", path.display())
            }
            (None, Some(_)) if keys.is_empty() => {
                bail!("{API_KEYS} has no API keys: expected one, or an unset variable")
            }
            _ => Ok(keys),
        }
    }

    /// Reads the keys again, if they can have changed, and replaces `keys`.
    fn reload(&self, keys: &ApiKeys) {
        if self.file.is_none() {
            return; // the environment of a process does not change
        }
        match self.read() {
            Ok(new) => {
                keys.replace(&new);
                tracing::info!("API keys reloaded");
            }
            Err(error) => {
                let error = messages::error_line(&error);
                tracing::error!(error, "API keys not reloaded: the old keys are still valid");
            }
        }
    }
}

/// Whether a value is `*`, or a scheme, a host and an optional port, as browsers send them: in
/// lower case, and without the scheme's default port.
fn is_origin(value: &str) -> bool {
    let is_in_scheme = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || "+.-".contains(c);
    let is_in_host =
        |c: char| c.is_ascii_graphic() && !c.is_ascii_uppercase() && !"/?#@*".contains(c);
    let Some((scheme, host)) = value.split_once("://") else { return value == "*" };
    let default_port = match scheme {
        "http" => Some(":80"),
        "https" => Some(":443"),
        _ => None,
    };
    scheme.starts_with(|c: char| c.is_ascii_lowercase())
        && scheme.chars().all(is_in_scheme)
        && !host.is_empty()
        && host.chars().all(is_in_host)
        && default_port.is_none_or(|port| !host.ends_with(port))
}

/// The value of an option for a model: the last value with the model's name, otherwise the last
/// value without a name.
fn value_of<'a, T>(values: &'a [Named<T>], model: &str) -> Option<&'a T> {
    let of = |name: Option<&str>| values.iter().rev().find(|named| named.name.as_deref() == name);
    of(Some(model)).or_else(|| of(None)).map(|named| &named.value)
}

/// The last component of the path of a folder or a file, after links to folders are resolved. If
/// the path does not exist: the last component of the name on the hub, without the revision.
fn default_name(model: &str) -> String {
    match model::canonical(model) {
        Some(path) => path.rsplit(MAIN_SEPARATOR).next().unwrap_or_default().to_string(),
        None => {
            let name = model.split('@').next().unwrap_or(model);
            name.rsplit('/').next().unwrap_or(name).to_string()
        }
    }
}

/// Loads the models, in their order.
fn load(sources: &[Source], machine: &Machine) -> Result<Vec<(String, Model)>> {
    let load = |Source { name, model, dtype, embedding }: &Source| {
        let files = default_model::open_or_default(model.as_deref())?;
        let log = |choice: &str| tracing::info!(name, "{choice}");
        let options = machine.options(*dtype, log)?;
        let model = Model::from_files(&files, embedding.clone(), &options)
            .map_err(|error| anyhow!("model {name:?} cannot be served: {error}"))?;
        tracing::info!(name, task = model.task_name(), dtype = model.dtype(), "loaded");
        Ok((name.clone(), model))
    };
    sources.iter().map(load).collect()
}

/// Serves until SIGTERM or SIGINT. SIGHUP reads the API keys and loads the models again.
pub fn run(args: Args) -> Result<()> {
    start_log(args.log)?;
    args.machine.start_threads()?;
    let (sources, key_sources) = (args.sources()?, Arc::new(args.key_sources()?));
    let api_keys = key_sources.read()?;
    let access = args.access(api_keys.clone())?;
    let models = Models::new(args.limits.limits())?;
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let result = runtime.block_on(async {
        let address = resolve(&args.host, args.port).await?;
        let listener = TcpListener::bind(address).await;
        let listener = listener.map_err(|error| {
            anyhow!("cannot listen on {address}: {error}; choose another --host or --port")
        })?;
        tracing::info!("listening on http://{}", listener.local_addr()?);
        let (end, mut reload) = signals()?;
        let (machine, sources) = (Arc::new(args.machine), Arc::new(sources));
        let load = {
            let models = models.clone();
            move || {
                let (models, machine, sources) = (models.clone(), machine.clone(), sources.clone());
                async move {
                    let load = move || Ok(models.replace(load(&sources, &machine)?)?);
                    spawn_blocking(load).await.unwrap_or_else(|error| Err(error.into()))
                }
            }
        };
        let first = load();
        let shutdown = async {
            end.await;
            tracing::info!("shutting down");
        };
        let reloads = async {
            first.await?;
            tracing::info!("ready");
            while reload.recv().await.is_some() {
                let (key_sources, api_keys) = (key_sources.clone(), api_keys.clone());
                spawn_blocking(move || key_sources.reload(&api_keys)).await.ok();
                match load().await {
                    Ok(()) => tracing::info!("models reloaded"),
                    Err(error) => {
                        let error = messages::error_line(&error);
                        tracing::error!(error, "models not reloaded: the old models still serve");
                    }
                }
            }
            Ok(())
        };
        let serve = server::serve(listener, models.clone(), access, shutdown);
        tokio::pin!(serve);
        tokio::select! {
            () = &mut serve => Ok(()),
            failed = reloads => match failed {
                Err(error) => Err(error),
                Ok(()) => {
                    serve.await; // there are no more signals
                    Ok(())
                }
            },
        }
    });
    // Do not wait for a model that is still loading.
    runtime.shutdown_background();
    #[cfg(feature = "otel")]
    traces::finish();
    result
}

/// The first IPv4 address of a host, or else its first address.
async fn resolve(host: &str, port: u16) -> Result<SocketAddr> {
    let found = lookup_host((host, port)).await;
    let found: Vec<SocketAddr> = found.map(Iterator::collect).map_err(|error| {
        anyhow!("--host {host:?} cannot be resolved: expected an IP address or a name; {error}")
    })?;
    let first = found.iter().find(|address| address.is_ipv4()).or(found.first());
    first.copied().ok_or_else(|| anyhow!("--host {host:?} has no address: expected at least one"))
}

/// A future that is ready at SIGTERM or SIGINT, and a receiver of SIGHUP.
fn signals() -> io::Result<(impl Future<Output = ()>, Signal)> {
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    let end = async move {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
        // The second signal ends the process at once.
        tokio::spawn(async move {
            tokio::select! {
                _ = terminate.recv() => {}
                _ = interrupt.recv() => {}
            }
            std::process::exit(1);
        });
    };
    Ok((end, signal(SignalKind::hangup())?))
}

/// Writes the log to standard error and, with the feature `otel`, traces to a collector.
fn start_log(format: LogFormat) -> Result<()> {
    let level = EnvFilter::builder().with_default_directive(tracing::Level::INFO.into());
    let level = level.from_env().map_err(|error| anyhow!("RUST_LOG is invalid: {error}"))?;
    let log = tracing_subscriber::fmt::layer()
        .with_writer(io::stderr)
        .with_ansi(messages::is_colored(&io::stderr()))
        .with_target(false);
    let log = match format {
        LogFormat::Text => log.boxed(),
        LogFormat::Json => log.json().boxed(),
    };
    let layers = tracing_subscriber::registry().with(level).with(log);
    #[cfg(feature = "otel")]
    let layers = layers.with(traces::layer()?);
    layers.try_init().map_err(|error| anyhow!("the log cannot be started: {error}"))
}

/// Traces for an OpenTelemetry collector.
#[cfg(feature = "otel")]
mod traces {
    use std::sync::OnceLock;

    use anyhow::Result;
    use opentelemetry::{global, trace::TracerProvider};
    use opentelemetry_otlp::SpanExporter;
    use opentelemetry_sdk::{
        Resource, propagation::TraceContextPropagator, trace::SdkTracerProvider,
    };
    use tracing::Subscriber;
    use tracing_subscriber::{Layer, registry::LookupSpan};

    static PROVIDER: OnceLock<SdkTracerProvider> = OnceLock::new();

    /// Sends traces to the collector that the standard environment variables of OpenTelemetry
    /// name; `None` if they name none.
    pub fn layer<S>() -> Result<Option<impl Layer<S>>>
    where
        S: Subscriber + for<'span> LookupSpan<'span>,
    {
        let endpoints = ["OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"];
        if !endpoints.iter().any(|name| std::env::var_os(name).is_some()) {
            return Ok(None);
        }
        global::set_text_map_propagator(TraceContextPropagator::new());
        let mut resource = Resource::builder();
        if std::env::var_os("OTEL_SERVICE_NAME").is_none() {
            resource = resource.with_service_name("encodle");
        }
        let provider = SdkTracerProvider::builder()
            .with_batch_exporter(SpanExporter::builder().with_http().build()?)
            .with_resource(resource.build())
            .build();
        let tracer = PROVIDER.get_or_init(|| provider).tracer("encodle");
        Ok(Some(tracing_opentelemetry::layer().with_tracer(tracer)))
    }

    /// Sends the traces that are not sent yet.
    pub fn finish() {
        if let Some(Err(error)) = PROVIDER.get().map(SdkTracerProvider::shutdown) {
            crate::messages::print(&format!("traces cannot be sent: {error}"));
        }
    }
}

#[cfg(test)]
mod tests {
    use std::ffi::OsStr;

    use clap::CommandFactory;

    use super::*;

    #[test]
    fn options_apply_to_the_model_that_they_name() {
        let args = |given: &[&str]| {
            Args::parse_from(std::iter::once("serve").chain(given.iter().copied()))
        };
        let given = args(&[
            "--model",
            "a=x/y",
            "--model",
            "org/b@main",
            "--dtype",
            "bf16",
            "--dtype",
            "b=int8",
            "--pooling",
            "a=cls,mean",
            "--kind",
            "b=sparse",
        ]);
        let sources = given.sources().unwrap();
        let names: Vec<&str> = sources.iter().map(|source| source.name.as_str()).collect();
        assert_eq!(names, ["a", "b"]);
        assert_eq!(
            [sources[0].dtype, sources[1].dtype],
            [Some(Precision::Bf16), Some(Precision::Int8)]
        );
        assert!(matches!(sources[0].embedding, Some(Embedding::Pooled(_))));
        assert_eq!(sources[1].embedding, Some(Embedding::Kind(EmbeddingKind::Sparse)));
        let default = args(&[]).sources().unwrap();
        assert_eq!((&default[0].name[..], &default[0].model), ("all-MiniLM-L6-v2", &None));
        let unknown = args(&["--dtype", "c=int8"]).sources().err().unwrap();
        assert!(unknown.to_string().contains("unknown model \"c\""), "{unknown}");
        let both = args(&["--model", "a=x", "--pooling", "cls", "--kind", "sparse"]);
        let both = both.sources().err().unwrap().to_string();
        assert!(both.contains("--pooling has no effect on a sparse model"), "{both}");
    }

    #[test]
    fn every_option_has_an_environment_variable() {
        for option in Args::command().get_arguments() {
            let Some(name) = option.get_long().filter(|name| *name != "help") else { continue };
            let expected = format!("ENCODLE_{}", name.to_uppercase().replace('-', "_"));
            assert_eq!(option.get_env().and_then(OsStr::to_str), Some(&*expected), "--{name}");
        }
    }

    #[test]
    fn web_origins_have_a_scheme_and_a_host() {
        let origins = [
            "*",
            "https://example.org",
            "http://localhost:3000",
            "http://[::1]:8000",
            "app://none",
        ];
        for origin in origins {
            assert!(is_origin(origin), "{origin}");
        }
        for other in [
            "",
            "example.org",
            "https://",
            "https://example.org/",
            "not an origin",
            "a b://x",
            "https://Example.org",
            "https://example.org:443",
            "https://*.example.org",
        ] {
            assert!(!is_origin(other), "{other}");
        }
    }

    #[test]
    fn the_default_name_is_the_last_component() {
        for (model, name) in [
            ("org/name@main", "name"),
            ("org/name@refs/pr/1", "name"),
            ("org/name", "name"),
            ("none/x/", ""),
        ] {
            assert_eq!(default_name(model), name);
        }
    }
}
