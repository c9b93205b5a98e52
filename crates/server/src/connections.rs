//! The open connections of a server, and which of them are idle.

use std::{
    collections::BTreeMap,
    io::{self, IoSlice},
    pin::Pin,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    task::{Context, Poll},
    time::Duration,
};

use axum::{
    body::{Body, Bytes, HttpBody},
    http::{HeaderValue, Method, Uri},
};
use hyper::body::{Frame, SizeHint};
use prometheus::IntGauge;
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::TcpStream,
    sync::Notify,
    time::{Instant, timeout},
};
use tokio_io_timeout::TimeoutStream;
use tracing::Span;

use crate::responses::request_span;

/// An idle connection is not closed before this time, since its next request may be on its way.
const MIN_IDLE: Duration = Duration::from_secs(1);

/// The open connections of a server. While there are as many as allowed, a new connection replaces
/// the one that has been idle for the longest time.
///
/// A connection is idle if it has no request in progress and all of its responses are written. It
/// is also idle until the header of its first request has arrived.
pub struct Connections {
    max: usize,
    min_idle: Duration,
    state: Mutex<State>,
    /// Notified when a connection ends or becomes idle.
    changed: Notify,
    open: IntGauge,
}

#[derive(Default)]
struct State {
    open: usize,
    /// The number of the next connection that becomes idle.
    next: u64,
    /// The idle connections, in the order in which they became idle.
    idle: BTreeMap<u64, Idle>,
    /// The number of the connection that [`Connections::admit`] has asked to close.
    closing: Option<u64>,
}

struct Idle {
    since: Instant,
    close: Arc<Notify>,
}

impl Connections {
    /// `open` is the metric of open connections.
    pub fn new(max: usize, open: IntGauge) -> Arc<Self> {
        Self::with_min_idle(max, MIN_IDLE, open)
    }

    fn with_min_idle(max: usize, min_idle: Duration, open: IntGauge) -> Arc<Self> {
        Arc::new(Self { max, min_idle, state: Mutex::default(), changed: Notify::new(), open })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until one more connection is allowed, and closes an idle connection if necessary.
    pub async fn admit(self: &Arc<Self>) -> Arc<Connection> {
        loop {
            if let Some(connection) = self.try_admit() {
                return connection;
            }
            let changed = self.changed.notified();
            match self.close_idle() {
                Some(pause) => timeout(pause, changed).await.unwrap_or_default(),
                None => changed.await,
            }
        }
    }

    /// A new connection, if one more is allowed.
    pub fn try_admit(self: &Arc<Self>) -> Option<Arc<Connection>> {
        let mut state = self.lock();
        if state.open >= self.max {
            return None;
        }
        state.open += 1;
        drop(state);
        self.open.inc();
        let connection = Connection {
            all: self.clone(),
            activity: Mutex::default(),
            close: Arc::new(Notify::new()),
        };
        connection.update(|_| {});
        Some(Arc::new(connection))
    }

    /// Asks the connection that has been idle for the longest time to close, unless another is
    /// already closing. Returns how long to wait if that connection is not idle for long enough
    /// yet.
    fn close_idle(&self) -> Option<Duration> {
        let mut state = self.lock();
        if state.closing.is_some() {
            return None;
        }
        let (&number, idle) = state.idle.first_key_value()?;
        let pause = self.min_idle.saturating_sub(idle.since.elapsed());
        if !pause.is_zero() {
            return Some(pause);
        }
        idle.close.notify_one();
        state.closing = Some(number);
        None
    }

    fn add_idle(&self, close: Arc<Notify>) -> u64 {
        let mut state = self.lock();
        let number = state.next;
        state.next += 1;
        state.idle.insert(number, Idle { since: Instant::now(), close });
        drop(state);
        self.changed.notify_one();
        number
    }
}

impl State {
    fn remove_idle(&mut self, number: u64) {
        self.idle.remove(&number);
        self.closing = self.closing.filter(|&closing| closing != number);
    }
}

/// An open connection. Dropping the value counts the connection as closed.
pub struct Connection {
    all: Arc<Connections>,
    activity: Mutex<Activity>,
    close: Arc<Notify>,
}

#[derive(Default)]
struct Activity {
    has_request: bool,
    /// Whether a write waits for the client.
    is_blocked: bool,
    /// The number of the connection among the idle ones.
    idle: Option<u64>,
    /// The last request that has a response.
    last: Option<Request>,
}

/// The fields of a request in the log. The span of the request would end with the request.
pub struct Request {
    pub id: HeaderValue,
    pub method: Method,
    pub uri: Uri,
}

impl Activity {
    fn is_idle(&self) -> bool {
        !self.has_request && !self.is_blocked
    }
}

impl Connection {
    fn lock(&self) -> MutexGuard<'_, Activity> {
        self.activity.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn update(&self, change: impl FnOnce(&mut Activity)) {
        let mut activity = self.lock();
        change(&mut activity);
        match (activity.is_idle(), activity.idle) {
            (true, None) => activity.idle = Some(self.all.add_idle(self.close.clone())),
            (false, Some(number)) => {
                self.all.lock().remove_idle(number);
                self.all.changed.notify_one(); // another connection may have to close instead
                activity.idle = None;
            }
            _ => {}
        }
    }

    /// Waits until the connection must close because it is idle.
    pub async fn wait_for_eviction(&self) {
        loop {
            self.close.notified().await;
            let idle = self.lock().idle;
            // A request may have arrived since.
            if idle.is_some() && self.all.lock().closing == idle {
                return;
            }
        }
    }

    /// Marks the begin of a request. The connection is idle when the guard is dropped.
    pub fn begin_request(self: &Arc<Self>) -> RequestGuard {
        self.update(|activity| activity.has_request = true);
        RequestGuard(self.clone())
    }

    /// Records the result of a write.
    fn record_write(&self, result: &Poll<io::Result<usize>>) {
        self.update(|activity| activity.is_blocked = result.is_pending());
        if let Poll::Ready(Err(error)) = result
            && error.kind() == io::ErrorKind::TimedOut
        {
            let activity = self.lock();
            let last = activity.last.as_ref();
            let span = last.map(|Request { id, method, uri }| request_span(id, method, uri));
            let reason = "the client does not read the response";
            span.unwrap_or_else(Span::none).in_scope(|| tracing::warn!(reason, "disconnected"));
        }
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        let idle = self.lock().idle;
        let mut state = self.all.lock();
        // In one step, so that no other connection is closed in this one's place.
        idle.into_iter().for_each(|number| state.remove_idle(number));
        state.open -= 1;
        drop(state);
        self.all.open.dec();
        self.all.changed.notify_one();
    }
}

/// A request of a connection, until its response is sent.
pub struct RequestGuard(Arc<Connection>);

impl RequestGuard {
    /// The body of the response, with this guard.
    pub fn with_body(self, body: Body, request: Option<Request>) -> GuardedBody {
        self.0.lock().last = request;
        GuardedBody { body, _guard: self }
    }
}

impl Drop for RequestGuard {
    fn drop(&mut self) {
        self.0.update(|activity| activity.has_request = false);
    }
}

/// The body of a response, which hyper drops when all of it is in the buffer of the connection.
pub struct GuardedBody {
    body: Body,
    _guard: RequestGuard,
}

impl HttpBody for GuardedBody {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        Pin::new(&mut self.body).poll_frame(context)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

/// The stream of a connection. A write that makes no progress within a time limit fails.
pub struct Stream {
    stream: Pin<Box<TimeoutStream<TcpStream>>>,
    connection: Arc<Connection>,
}

impl Stream {
    pub fn new(stream: TcpStream, write_timeout: Duration, connection: Arc<Connection>) -> Self {
        let mut stream = TimeoutStream::new(stream);
        stream.set_write_timeout(Some(write_timeout));
        Self { stream: Box::pin(stream), connection }
    }
}

impl AsyncRead for Stream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        self.stream.as_mut().poll_read(context, buffer)
    }
}

impl AsyncWrite for Stream {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let result = self.stream.as_mut().poll_write(context, bytes);
        self.connection.record_write(&result);
        result
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        parts: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let result = self.stream.as_mut().poll_write_vectored(context, parts);
        self.connection.record_write(&result);
        result
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.stream.as_mut().poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.stream.as_mut().poll_shutdown(context)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIN: Duration = Duration::from_millis(50);

    fn connections(max: usize) -> Arc<Connections> {
        Connections::with_min_idle(max, MIN, IntGauge::new("open", "open").unwrap())
    }

    /// Whether the future is still pending after more than `MIN`.
    async fn is_pending<T>(future: impl Future<Output = T>) -> bool {
        timeout(4 * MIN, future).await.is_err()
    }

    /// Closes the connection when the server asks for this.
    async fn close(connection: Arc<Connection>) {
        connection.wait_for_eviction().await;
    }

    #[tokio::test]
    async fn the_connection_that_is_idle_for_the_longest_time_is_closed_first() {
        let all = connections(3);
        let [a, b, c] = [all.admit().await, all.admit().await, all.admit().await];
        drop(a.begin_request()); // now `b` is idle for the longest time
        let busy = c.begin_request();
        let (d, ()) = tokio::join!(all.admit(), close(b));
        assert_eq!(all.open.get(), 3);
        assert!(is_pending(a.wait_for_eviction()).await, "one place was needed");
        let ((e, f), (), ()) =
            tokio::join!(async { (all.admit().await, all.admit().await) }, close(a), close(d));
        let _busy = [e.begin_request(), f.begin_request()];
        assert!(is_pending(all.admit()).await && is_pending(c.wait_for_eviction()).await);
        drop(busy);
        tokio::join!(all.admit(), close(c));
    }

    #[tokio::test]
    async fn a_connection_is_not_closed_before_the_minimum_idle_time() {
        let all = connections(1);
        let start = Instant::now();
        let a = all.admit().await;
        tokio::join!(all.admit(), close(a));
        assert!(start.elapsed() >= MIN);
    }

    #[tokio::test]
    async fn a_connection_that_gets_a_request_before_it_closes_stays_open() {
        let all = connections(2);
        let [a, b] = [all.admit().await, all.admit().await];
        tokio::time::sleep(MIN).await;
        assert!(all.close_idle().is_none() && all.lock().closing.is_some());
        drop(a.begin_request());
        assert!(all.lock().closing.is_none());
        assert!(is_pending(a.wait_for_eviction()).await);
        tokio::join!(all.admit(), close(b));
    }

    #[tokio::test]
    async fn a_connection_whose_client_does_not_read_is_not_idle() {
        let all = connections(1);
        let a = all.admit().await;
        a.record_write(&Poll::Pending);
        assert!(is_pending(all.admit()).await);
        a.record_write(&Poll::Ready(Ok(1)));
        tokio::join!(all.admit(), close(a));
    }
}
