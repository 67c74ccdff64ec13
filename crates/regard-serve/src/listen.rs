//! Connections: how many, how slow, and how they end.

use axum::Router;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::graceful::GracefulShutdown;
use hyper_util::service::TowerToHyperService;
use std::future::Future;
use std::io::Write;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;

/// What bounds connections.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Connections at once. More get a 503.
    pub connections: usize,
    /// How long the head of a request may take to arrive.
    pub head: Duration,
    /// Bytes of the head of a request.
    pub head_bytes: usize,
    /// After the end was asked for: how long requests may still take.
    pub drain: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        let (head, drain) = (Duration::from_secs(10), Duration::from_secs(50));
        Self { connections: 1024, head, head_bytes: 1 << 14, drain }
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
        let connection = http.serve_connection(TokioIo::new(stream), service);
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

/// Says that there are too many connections. So little fits the buffer of a socket: this does not wait.
fn refuse(stream: TcpStream) {
    // One that is not blocking, and that tokio has not yet found to be writable.
    let Ok(mut stream) = stream.into_std() else { return };
    let _gone = stream.write_all(
        b"HTTP/1.1 503 Service Unavailable\r\ncontent-type: text/plain; charset=utf-8\r\nretry-after: 1\r\n\
          content-length: 31\r\nconnection: close\r\n\r\ntoo many connections; try again",
    );
}
