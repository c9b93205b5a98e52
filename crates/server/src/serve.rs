//! Connections: accepting, limits and shutdown.

use std::{convert::Infallible, io, sync::Arc, time::Duration};

use axum::{
    body::Body,
    extract::Request,
    http::{HeaderValue, Method, header},
    response::Response,
};
use hyper::{body::Incoming, server::conn::http1, service::service_fn};
use hyper_util::{
    rt::{TokioIo, TokioTimer},
    server::graceful::GracefulShutdown,
};
use tokio::{
    net::{TcpListener, TcpStream},
    time::{Instant, sleep, timeout, timeout_at},
};
use tower_http::cors::{AllowHeaders, AllowOrigin, Any, CorsLayer};
use tower_service::Service;

use crate::{
    ApiKeys, Models, api,
    connections::{self, Connection, Connections, Stream},
    framing,
    responses::REQUEST_ID,
};

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
    let app = models.0;
    let mut router = api::build(app.clone(), access.api_keys);
    if !access.origins.is_empty() {
        router = router.layer(cors(&access.origins));
    }
    let service = router.into_service::<Body>();
    let limits = &app.limits;
    let connections = Connections::new(limits.max_connections, app.metrics.connections.clone());
    let graceful = GracefulShutdown::new();
    let header_timeout = HEADER_TIMEOUT.min(limits.timeout);
    let write_timeout = limits.timeout.min(MAX_WRITE_TIMEOUT);
    let start = |stream, connection| {
        AcceptedConnection {
            stream,
            connection,
            graceful: &graceful,
            header_timeout,
            write_timeout,
        }
        .start(service.clone());
    };
    // An accepted connection that waits because there are too many. It is kept here when `accept`
    // is cancelled.
    let mut waiting = None;
    let mut accept = async |until: Option<Instant>| {
        // The loop checks the deadline itself: if `listener.accept` returns an error at once, for
        // example because no file descriptor is free, `timeout_at` returns this error even after
        // the deadline.
        while until.is_none_or(|until| Instant::now() < until) {
            let next = async {
                if waiting.is_none() {
                    waiting = Some(listener.accept().await?.0);
                }
                Ok::<_, io::Error>(connections.admit().await)
            };
            let admitted = match until {
                None => next.await,
                Some(until) => match timeout_at(until, next).await {
                    Ok(admitted) => admitted,
                    Err(_) => return,
                },
            };
            match admitted {
                Ok(connection) => start(waiting.take().expect("just accepted"), connection),
                Err(error) => {
                    tracing::warn!(%error, "a connection cannot be accepted");
                    sleep(ACCEPT_PAUSE).await;
                }
            }
        }
    };
    tokio::select! {
        () = shutdown => {}
        () = accept(None) => {}
    }
    app.stop();
    accept(Some(Instant::now() + ACCEPT_AFTER_SHUTDOWN)).await;
    // When the listener is closed, the kernel resets the connections that were not accepted, so
    // accept them first.
    if let Ok(listener) = listener.into_std() {
        let accept = || {
            let (stream, _) = listener.accept().ok()?;
            stream.set_nonblocking(true).ok()?;
            TcpStream::from_std(stream).ok()
        };
        while let Some(stream) = waiting.take().or_else(accept)
            && let Some(connection) = connections.try_admit()
        {
            start(stream, connection);
        }
    }
    // A connection that was accepted last may still send its request.
    sleep(LAST_REQUEST).await;
    if timeout(limits.timeout, graceful.shutdown()).await.is_err() {
        tracing::warn!(seconds = limits.timeout.as_secs_f64(), "requests did not end in time");
    }
}

/// An accepted connection.
struct AcceptedConnection<'a> {
    stream: TcpStream,
    connection: Arc<Connection>,
    graceful: &'a GracefulShutdown,
    header_timeout: Duration,
    write_timeout: Duration,
}

impl AcceptedConnection<'_> {
    /// Answers the requests of the connection in a task of its own.
    fn start<S>(self, service: S)
    where
        S: Service<Request, Response = Response, Error = Infallible> + Clone + Send + 'static,
        S::Future: Send,
    {
        let Self { stream, connection, .. } = self;
        stream.set_nodelay(true).ok(); // without it, responses are only slower
        // A client that does not read its response is disconnected.
        let stream = Stream::new(stream, self.write_timeout, connection.clone());
        let connection_of_requests = connection.clone();
        let call = service_fn(move |request: hyper::Request<Incoming>| {
            let guard = connection_of_requests.begin_request();
            let mut request = request.map(Body::new);
            if let Err(failure) = framing::check(&request) {
                request.extensions_mut().insert(failure);
            }
            let method = request.method().clone();
            let uri = request.uri().clone();
            let response = service.clone().call(request);
            async {
                let (parts, body) = response.await?.into_parts();
                let id = parts.headers.get(REQUEST_ID).cloned();
                let body =
                    guard.with_body(body, id.map(|id| connections::Request { id, method, uri }));
                Ok::<_, Infallible>(Response::from_parts(parts, body))
            }
        });
        let connection_future = http1::Builder::new()
            .timer(TokioTimer::new())
            .header_read_timeout(self.header_timeout)
            .max_buf_size(MAX_HEADER)
            .serve_connection(TokioIo::new(stream), call);
        let served = self.graceful.watch(connection_future);
        tokio::spawn(async move {
            tokio::select! {
                biased; // a request that has arrived is served
                ended = served => {
                    if let Err(error) = ended {
                        tracing::debug!(%error, "connection ended");
                    }
                }
                () = connection.wait_for_eviction() => tracing::debug!("idle connection closed"),
            }
        });
    }
}

fn cors(origins: &[HeaderValue]) -> CorsLayer {
    let origin = if origins.iter().any(|origin| origin == "*") {
        AllowOrigin::from(Any)
    } else {
        AllowOrigin::list(origins.iter().cloned())
    };
    CorsLayer::new()
        .allow_origin(origin)
        .allow_methods([Method::GET, Method::POST])
        // Clients send headers of their own, such as `x-stainless-os`.
        .allow_headers(AllowHeaders::mirror_request())
        .expose_headers([REQUEST_ID, header::RETRY_AFTER, api::replies::TRUNCATED_TEXTS])
}
