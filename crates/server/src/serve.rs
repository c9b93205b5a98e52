//! Connections: accepting, limits and shutdown.

use std::{convert::Infallible, sync::Arc, time::Duration};

use axum::{
    body::Body,
    extract::Request,
    http::{HeaderName, HeaderValue, Method, header},
    response::Response,
};
use hyper::{body::Incoming, server::conn::http1, service::service_fn};
use hyper_util::{
    rt::{TokioIo, TokioTimer},
    server::graceful::GracefulShutdown,
};
use prometheus::IntGauge;
use tokio::{
    net::{TcpListener, TcpStream},
    sync::{OwnedSemaphorePermit, Semaphore},
    time::{Instant, sleep, timeout, timeout_at},
};
use tokio_io_timeout::TimeoutStream;
use tower_http::cors::{AllowHeaders, AllowOrigin, Any, CorsLayer};
use tower_service::Service;

use crate::{ApiKeys, Models, api};

/// Maximum number of open connections; further connections wait. The value is below the usual limit
/// of 1,024 open files.
const MAX_CONNECTIONS: usize = 960;
/// Maximum time for the header of a request, and for the pause between two requests of a
/// connection.
const HEADER_TIMEOUT: Duration = Duration::from_secs(30);
/// The longest timeout of a write; tokio-io-timeout panics if the end is beyond the range of the
/// clock.
const MAX_WRITE_TIMEOUT: Duration = Duration::from_secs(24 * 60 * 60);
/// Size of the buffer for the header of a request, in bytes. hyper accepts every header of at most
/// this size, and none of twice this size or more.
const MAX_HEADER: usize = 64 << 10;
/// How long the server accepts connections after the signal to end, while `/health` fails and
/// responses close their connections.
const ACCEPT_AFTER_SHUTDOWN: Duration = Duration::from_millis(500);
/// How long the server waits for the requests of the connections that were accepted last.
const LAST_REQUEST: Duration = Duration::from_millis(100);
/// The pause after a failure to accept a connection, such as for lack of file descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// The access rules of a server: API keys and web origins.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct Access {
    /// The API keys; none if every request is accepted.
    pub api_keys: ApiKeys,
    /// The web origins that may use the server from a browser; `*` for all.
    pub origins: Vec<HeaderValue>,
}

/// Answers requests until `shutdown` is ready. Then `/health` fails, and connections are accepted
/// for another half second, in which load balancers notice the failure. Then `serve` waits for the
/// requests in progress, for at most [`Limits::timeout`](crate::Limits), and returns. Requests that
/// are not answered by then run on until the runtime ends.
///
/// # Examples
/// ```
/// use std::{io::Write, net::TcpStream};
///
/// use server::{Access, Limits, Models, serve};
/// use tokio::{net::TcpListener, sync::oneshot, task::spawn_blocking};
///
/// # #[tokio::main]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let models = Models::new(Limits::default())?; // `router` shows how to add a model
/// let listener = TcpListener::bind("127.0.0.1:0").await?;
/// let address = listener.local_addr()?;
/// let (stop, stopped) = oneshot::channel::<()>();
/// let server = tokio::spawn(serve(listener, models, Access::default(), async {
///     stopped.await.ok();
/// }));
///
/// let response = spawn_blocking(move || {
///     let mut connection = TcpStream::connect(address)?;
///     connection.write_all(b"GET /live HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")?;
///     std::io::read_to_string(connection)
/// });
/// assert!(response.await??.starts_with("HTTP/1.1 200 OK"));
///
/// stop.send(()).ok();
/// server.await?;
/// # Ok(())
/// # }
/// ```
pub async fn serve(
    listener: TcpListener,
    models: Models,
    access: Access,
    shutdown: impl Future<Output = ()>,
) {
    let mut router = api::build(models.clone(), access.api_keys);
    if !access.origins.is_empty() {
        router = router.layer(cors(&access.origins));
    }
    let service = router.into_service::<Body>();
    let connections = Arc::new(Semaphore::new(MAX_CONNECTIONS));
    let graceful = GracefulShutdown::new();
    let header_timeout = HEADER_TIMEOUT.min(models.limits().timeout);
    let write_timeout = models.limits().timeout.min(MAX_WRITE_TIMEOUT);
    let start = |permit, stream| {
        let open = models.metrics().connections.clone();
        let guard = ConnectionGuard::new(permit, open);
        let graceful = &graceful;
        let connection = Connection { stream, graceful, header_timeout, write_timeout };
        connection.start(service.clone(), guard);
    };
    let accept = async |until: Option<Instant>| {
        // The loop checks the deadline itself: if `listener.accept` returns an error at once, for
        // example because no file descriptor is free, `timeout_at` returns this error even after
        // the deadline.
        while until.is_none_or(|until| Instant::now() < until) {
            let permit = connections.clone().acquire_owned();
            let next = async { (permit.await, listener.accept().await) };
            let (permit, accepted) = match until {
                None => next.await,
                Some(until) => match timeout_at(until, next).await {
                    Ok(accepted) => accepted,
                    Err(_) => return,
                },
            };
            match (permit, accepted) {
                (Ok(permit), Ok((stream, _))) => start(permit, stream),
                (_, Err(error)) => {
                    tracing::warn!(%error, "a connection cannot be accepted");
                    sleep(ACCEPT_PAUSE).await;
                }
                (Err(_), _) => return, // the semaphore is never closed
            }
        }
    };
    tokio::select! {
        () = shutdown => {}
        () = accept(None) => {}
    }
    models.stop();
    accept(Some(Instant::now() + ACCEPT_AFTER_SHUTDOWN)).await;
    // When the listener is closed, the kernel resets the connections that were not accepted, so
    // accept them first.
    if let Ok(listener) = listener.into_std() {
        let accept = || {
            let (stream, _) = listener.accept().ok()?;
            stream.set_nonblocking(true).ok()?;
            TcpStream::from_std(stream).ok()
        };
        while let Some(stream) = accept()
            && let Ok(permit) = connections.clone().try_acquire_owned()
        {
            start(permit, stream);
        }
    }
    // A connection that was accepted last may still send its request.
    sleep(LAST_REQUEST).await;
    let limit = models.limits().timeout;
    if timeout(limit, graceful.shutdown()).await.is_err() {
        tracing::warn!(seconds = limit.as_secs_f64(), "requests did not end in time");
    }
}

/// Counts an open connection, and holds its permit, until the guard is dropped.
struct ConnectionGuard {
    _permit: OwnedSemaphorePermit,
    open: IntGauge,
}

impl ConnectionGuard {
    fn new(permit: OwnedSemaphorePermit, open: IntGauge) -> Self {
        open.inc();
        Self { _permit: permit, open }
    }
}

impl Drop for ConnectionGuard {
    fn drop(&mut self) {
        self.open.dec();
    }
}

/// An accepted connection.
struct Connection<'a> {
    stream: TcpStream,
    graceful: &'a GracefulShutdown,
    header_timeout: Duration,
    write_timeout: Duration,
}

impl Connection<'_> {
    /// Answers the requests of the connection in a task of its own.
    fn start<S>(self, service: S, guard: ConnectionGuard)
    where
        S: Service<Request, Response = Response, Error = Infallible> + Clone + Send + 'static,
        S::Future: Send,
    {
        self.stream.set_nodelay(true).ok(); // without it, responses are only slower
        let call = service_fn(move |request: hyper::Request<Incoming>| {
            service.clone().call(request.map(Body::new))
        });
        // A client that does not read its response is disconnected.
        let mut stream = TimeoutStream::new(self.stream);
        stream.set_write_timeout(Some(self.write_timeout));
        let connection = http1::Builder::new()
            .timer(TokioTimer::new())
            .header_read_timeout(self.header_timeout)
            .max_buf_size(MAX_HEADER)
            .serve_connection(TokioIo::new(Box::pin(stream)), call);
        let watched = self.graceful.watch(connection);
        tokio::spawn(async move {
            if let Err(error) = watched.await {
                tracing::debug!(%error, "connection ended");
            }
            drop(guard);
        });
    }
}

fn cors(origins: &[HeaderValue]) -> CorsLayer {
    let origin = match origins.iter().any(|origin| origin == "*") {
        true => AllowOrigin::from(Any),
        false => AllowOrigin::list(origins.iter().cloned()),
    };
    let id = HeaderName::from_static("x-request-id");
    CorsLayer::new()
        .allow_origin(origin)
        .allow_methods([Method::GET, Method::POST])
        // Clients send headers of their own, such as `x-stainless-os`.
        .allow_headers(AllowHeaders::mirror_request())
        .expose_headers([id, header::RETRY_AFTER, api::TRUNCATED_TEXTS])
}
