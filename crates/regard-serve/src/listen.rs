//! Connections: how many, how slow, and how they end.

use axum::Router;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::graceful::GracefulShutdown;
use hyper_util::service::TowerToHyperService;
use std::future::Future;
use std::io::{Error, ErrorKind, IoSlice, Write};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio::time::{Sleep, sleep};

/// What bounds connections.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Connections at once. More get a 503.
    pub connections: usize,
    /// How long the head of a request may take to arrive.
    pub head: Duration,
    /// Bytes of the head of a request.
    pub head_bytes: usize,
    /// How long a client may read nothing of what is sent to it.
    pub unread: Duration,
    /// After the end was asked for: how long requests may still take.
    pub drain: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        let [head, unread, drain] = [10, 60, 50].map(Duration::from_secs);
        Self { connections: 1024, head, head_bytes: 1 << 14, unread, drain }
    }
}

/// How long no connection is taken after one could not be: descriptors come back when others end.
const PAUSE: Duration = Duration::from_millis(50);

/// Serves connections until `end`; then takes no more, lets requests finish for [`Limits::drain`], and drops those that are left.
/// Returns whether all finished.
pub async fn listen(
    listener: TcpListener,
    router: Router,
    limits: Limits,
    end: impl Future<Output = ()>,
) -> bool {
    let room = Arc::new(Semaphore::new(limits.connections));
    let graceful = GracefulShutdown::new();
    let mut tasks = tokio::task::JoinSet::new();
    let mut http = http1::Builder::new();
    http.timer(TokioTimer::new()).header_read_timeout(limits.head);
    // A buffer holds the head as a whole; hyper asks for 8 KiB at least.
    http.max_buf_size(limits.head_bytes.max(8192));
    tokio::pin!(end);
    loop {
        let stream = tokio::select! {
            accepted = listener.accept() => match accepted {
                Ok((stream, _)) => stream,
                Err(_) => {
                    tokio::time::sleep(PAUSE).await;
                    continue;
                }
            },
            // Tasks that ended are dropped as they end: the set would grow without bounds.
            Some(_) = tasks.join_next(), if !tasks.is_empty() => continue,
            () = &mut end => break,
        };
        let Ok(place) = room.clone().try_acquire_owned() else {
            refuse(stream);
            continue;
        };
        // Tokens of a stream are small; none waits for the next.
        let _slower = stream.set_nodelay(true);
        let service = TowerToHyperService::new(router.clone());
        let stream = TokioIo::new(Impatient::new(stream, limits.unread));
        let connection = http.serve_connection(stream, service);
        let connection = graceful.watch(connection);
        tasks.spawn(async move {
            // Whoever has gone away is no error.
            let _gone = connection.await;
            drop(place);
        });
    }
    drop(listener);
    let finished = tokio::time::timeout(limits.drain, graceful.shutdown()).await.is_ok();
    tasks.abort_all();
    finished
}

/// A stream that fails where nothing can be written for a while: its client does not read, and would hold its connection and its answer
/// for ever.
struct Impatient<S> {
    stream: S,
    most: Duration,
    /// Since something could not be written.
    stuck: Option<Pin<Box<Sleep>>>,
}

impl<S: Unpin> Impatient<S> {
    fn new(stream: S, most: Duration) -> Self {
        Self { stream, most, stuck: None }
    }

    fn write<T>(
        &mut self,
        cx: &mut Context<'_>,
        act: impl FnOnce(Pin<&mut S>, &mut Context<'_>) -> Poll<Result<T, Error>>,
    ) -> Poll<Result<T, Error>> {
        let done = act(Pin::new(&mut self.stream), cx);
        if done.is_ready() {
            self.stuck = None;
            return done;
        }
        let stuck = self.stuck.get_or_insert_with(|| Box::pin(sleep(self.most)));
        stuck.as_mut().poll(cx).map(|()| Err(ErrorKind::TimedOut.into()))
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Impatient<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        to: &mut ReadBuf<'_>,
    ) -> Poll<Result<(), Error>> {
        Pin::new(&mut self.stream).poll_read(cx, to)
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Impatient<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<Result<usize, Error>> {
        self.write(cx, |stream, cx| stream.poll_write(cx, bytes))
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        parts: &[IoSlice<'_>],
    ) -> Poll<Result<usize, Error>> {
        self.write(cx, |stream, cx| stream.poll_write_vectored(cx, parts))
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Result<(), Error>> {
        self.write(cx, |stream, cx| stream.poll_flush(cx))
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Result<(), Error>> {
        self.write(cx, |stream, cx| stream.poll_shutdown(cx))
    }
}

/// Says that there are too many connections. So little fits the buffer of a socket: this does not wait.
fn refuse(stream: TcpStream) {
    // One that is not blocking, and that tokio has not yet found to be writable.
    let Ok(mut stream) = stream.into_std() else { return };
    let _gone = stream.write_all(
        b"HTTP/1.1 503 Service Unavailable\r\ncontent-type: text/plain; charset=utf-8\r\nretry-after: 1\r\n\
          content-length: 31\r\nconnection: close\r\n\r\ntoo many connections; try again",
    );
}

#[cfg(test)]
mod tests {
    use super::*;
    use axum::body::{Body, Bytes};
    use std::sync::Mutex;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::sync::oneshot;
    use tokio::time::{Instant, timeout};

    /// If paused, time goes on as soon as there is nothing else to do.
    fn runtime(paused: bool) -> tokio::runtime::Runtime {
        let mut builder = tokio::runtime::Builder::new_current_thread();
        builder.enable_all().start_paused(paused).build().expect("a runtime")
    }

    #[test]
    fn who_reads_nothing_for_a_while_is_given_up() {
        runtime(true).block_on(async {
            let (ours, mut theirs) = tokio::io::duplex(4);
            let mut ours = Impatient::new(ours, Duration::from_secs(60));
            let start = Instant::now();
            let reading = async {
                sleep(Duration::from_secs(59)).await;
                theirs.read_u8().await
            };
            let (written, read) = tokio::join!(ours.write_all(b"123456"), reading);
            assert_eq!(read.expect("a byte"), b'1');
            assert_eq!(written.expect_err("one byte is left").kind(), ErrorKind::TimedOut);
            // The time begins anew with what is read, and does not count where nothing is to be written.
            assert_eq!(start.elapsed().as_secs(), 59 + 60);
            let mut rest = [0; 4];
            theirs.read_exact(&mut rest).await.expect("what was written");
            sleep(Duration::from_secs(1000)).await;
            ours.write_all(b"789").await.expect("there is room");
        });
    }

    /// Bytes that say when they are dropped.
    struct Told(Vec<u8>, #[expect(dead_code, reason = "its drop tells")] oneshot::Sender<()>);

    impl AsRef<[u8]> for Told {
        fn as_ref(&self) -> &[u8] {
            &self.0
        }
    }

    #[test]
    fn an_answer_that_is_not_read_is_dropped() {
        /// More than the buffers of sockets hold.
        const SIZE: usize = 64 << 20;
        runtime(false).block_on(async {
            let (tell, dropped) = oneshot::channel();
            let large = Mutex::new(Some(Bytes::from_owner(Told(vec![b' '; SIZE], tell))));
            let large = Arc::new(large);
            let router = Router::new().fallback(async move || {
                Body::from(large.lock().expect("a lock").take().expect("one"))
            });
            let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
            let address = listener.local_addr().expect("an address");
            let limits = Limits { unread: Duration::from_millis(50), ..Limits::default() };
            let serving = tokio::spawn(listen(listener, router, limits, std::future::pending()));
            let mut client = TcpStream::connect(address).await.expect("a connection");
            client.write_all(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n").await.expect("it is sent");
            // Only the channel is waited for: nothing is read.
            let told = timeout(Duration::from_secs(60), dropped).await.expect("it is dropped");
            assert!(told.is_err(), "by its drop");
            let mut read = Vec::new();
            let _reset = client.read_to_end(&mut read).await;
            assert!(read.starts_with(b"HTTP/1.1 200") && read.len() < SIZE, "{}", read.len());
            serving.abort();
        });
    }
}
