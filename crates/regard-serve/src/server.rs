//! Start, signals, drain.

use crate::app::App;
use crate::engine::Common;
use crate::keys::Keys;
use crate::listen::{Limits, listen};
use crate::looks::Looks;
use crate::metrics::Metrics;
use crate::models::Models;
use crate::options::{NamedModel, Options, ServeError};
use crate::routes::router;
use std::future::Future;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};
use tokio::net::TcpListener;

/// Threads of tokio beside the one that speaks HTTP: two divide texts into tokens and make grammars, one makes a page.
const HELPERS: usize = 3;
/// How often samples of metrics are put into their buckets, and answers that are too old for a page are forgotten.
const UPKEEP: Duration = Duration::from_secs(5);
/// After the drain: how long answers of requests that were cancelled may take.
const GRACE: Duration = Duration::from_secs(2);

/// Serves until SIGTERM or Ctrl-C, then drains. `open` opens the models while `/readyz` says that they are not ready; `listening` is told
/// the address.
///
/// # Errors
/// If the options make no sense, the address cannot be had, or a model cannot be opened.
pub fn serve(
    options: Options,
    open: impl FnOnce() -> Result<Vec<NamedModel>, ServeError> + Send + 'static,
    listening: impl FnOnce(SocketAddr),
) -> Result<(), ServeError> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .max_blocking_threads(HELPERS)
        .build()
        .map_err(|e| ServeError::Io("tokio".into(), e))?;
    let served = runtime.block_on(serve_until(options, open, listening, signal()));
    // A page that is being made must not keep the process.
    runtime.shutdown_background();
    served
}

/// Until the system or the user asks for the end.
async fn signal() {
    let interrupt = async {
        // Without a handler, the signal ends the process: nothing to wait for.
        if tokio::signal::ctrl_c().await.is_err() {
            std::future::pending::<()>().await;
        }
    };
    #[cfg(unix)]
    {
        use tokio::signal::unix::{SignalKind, signal};
        if let Ok(mut terminate) = signal(SignalKind::terminate()) {
            tokio::select! {
                () = interrupt => {}
                _ = terminate.recv() => {}
            }
            return;
        }
    }
    interrupt.await;
}

/// The same until `end`.
///
/// # Errors
/// Those of [`serve`].
pub async fn serve_until(
    options: Options,
    open: impl FnOnce() -> Result<Vec<NamedModel>, ServeError> + Send + 'static,
    listening: impl FnOnce(SocketAddr),
    end: impl Future<Output = ()>,
) -> Result<(), ServeError> {
    options.check()?;
    let refused = |e| ServeError::Io(format!("--listen {}", options.listen), e);
    let listener = TcpListener::bind(options.listen).await.map_err(refused)?;
    listening(listener.local_addr().map_err(refused)?);
    let app = Arc::new(App {
        keys: Keys::new(options.keys.clone()),
        common: Arc::new(Common::new(Arc::new(Metrics::new()?))),
        models: OnceLock::new(),
        looks: Arc::new(Looks::new()),
        draining: AtomicBool::new(false),
        options,
    });
    let Options { drain_delay, drain, .. } = app.options;
    let opener = app.clone();
    let mut opening = tokio::task::spawn_blocking(move || {
        let mut threads = Vec::new();
        let models = Models::start(open()?, &opener.options, &opener.common, &mut threads)?;
        // Nobody else sets it.
        let _set = opener.models.set(models);
        tracing::info!("ready");
        Ok::<_, ServeError>(threads)
    });
    let keeper = app.clone();
    let upkeep = tokio::spawn(async move {
        loop {
            tokio::time::sleep(UPKEEP).await;
            keeper.metrics().upkeep();
            keeper.looks.forget(Instant::now());
        }
    });
    let usual = Limits::default();
    // A network may hesitate for longer than a short time limit.
    let unread = app.options.timeout.max(usual.head);
    let limits = Limits { drain: drain + GRACE, unread, ..usual };
    let stopping = app.clone();
    let closing = async move {
        end.await;
        stopping.draining.store(true, Ordering::Relaxed);
        tracing::info!(seconds = drain_delay.as_secs_f64(), "draining: not ready, still listening");
        tokio::time::sleep(drain_delay).await;
        // What is left then ends by its engine, which tells the client why.
        tokio::spawn(async move {
            tokio::time::sleep(drain).await;
            stopping.common.stop.store(true, Ordering::Relaxed);
        });
    };
    let accepting = listen(listener, router(app.clone()), limits, closing);
    tokio::pin!(accepting);
    let (finished, threads) = tokio::select! {
        finished = &mut accepting => (finished, None),
        opened = &mut opening => {
            let opened = opened.map_err(|e| ServeError::Model(e.to_string())).and_then(|opened| opened);
            match opened {
                Err(error) => {
                    upkeep.abort();
                    return Err(error);
                }
                Ok(threads) => (accepting.await, Some(threads)),
            }
        }
    };
    upkeep.abort();
    app.common.stop.store(true, Ordering::Relaxed);
    if !finished {
        tracing::warn!("requests were left at the end of the drain; they are cancelled");
    }
    // An engine ends after its step; one that hangs must not keep the process.
    let ended = async {
        let threads = match threads {
            Some(threads) => Ok(threads),
            None => opening.await.unwrap_or_else(|_| Ok(Vec::new())),
        };
        for thread in threads.into_iter().flatten() {
            while !thread.is_finished() {
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        }
    };
    let _late = tokio::time::timeout(Duration::from_secs(10), ended).await;
    Ok(())
}
