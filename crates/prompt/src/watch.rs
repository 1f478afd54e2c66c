//! Stops the computation of a prompt whose client has left, or whose template takes too long.
//!
//! Prompts are computed off the reactor, where nothing can stop them from outside: so the
//! computation itself checks whether its client has left, and a template checks whether its time is
//! over. A template checks when it takes an item of a list, because long renders do this for each
//! item, and when a filter writes a value. Its size is bounded while it is written.

use std::cell::{Cell, RefCell};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};

/// Limits of the computation of one prompt.
#[derive(Clone, Debug)]
pub struct Watch {
    /// Set when no client waits for the prompt any more.
    pub abandoned: Option<Arc<AtomicBool>>,
    /// Maximum processor time of the prompt's template.
    pub template_max: Duration,
}

/// Number of checks per reading of the clock.
const CHECKS_PER_CLOCK_READ: u32 = 16;

thread_local! {
    static WATCH: RefCell<Option<Watch>> = const { RefCell::new(None) };
    static RENDER: Cell<Render> = const { Cell::new(Render::NONE) };
}

/// The render that runs on this thread.
#[derive(Clone, Copy)]
struct Render {
    checks: u32,
    /// The thread's processor time at which the render must end; set at the first reading of the
    /// clock.
    until: Option<Duration>,
    is_over: bool,
    /// Maximum size in bytes of the prompt, and of each text that a filter makes for it.
    bytes_max: usize,
    is_too_long: bool,
}

impl Render {
    const NONE: Self =
        Self { checks: 0, until: None, is_over: false, bytes_max: usize::MAX, is_too_long: false };
}

/// Runs work with these limits.
pub fn with<T>(watch: Watch, work: impl FnOnce() -> T) -> T {
    /// Removes the limits again, also if the work panics.
    struct End;
    impl Drop for End {
        fn drop(&mut self) {
            WATCH.take();
        }
    }
    WATCH.replace(Some(watch));
    let _end = End;
    work()
}

/// Whether no client waits for the work of this thread any more.
pub fn is_abandoned() -> bool {
    WATCH.with_borrow(|watch| {
        let abandoned = watch.as_ref().and_then(|watch| watch.abandoned.as_ref());
        abandoned.is_some_and(|abandoned| abandoned.load(Relaxed))
    })
}

/// Runs a render whose text may have at most `bytes_max` bytes. Also returns the name of the bound that
/// stopped it, if one did.
pub(super) fn rendering<T>(
    bytes_max: usize,
    render: impl FnOnce() -> T,
) -> (T, Option<&'static str>) {
    RENDER.set(Render { bytes_max, ..Render::NONE });
    let result = render();
    let ended = RENDER.replace(Render::NONE);
    let exceeded = match (ended.is_over, ended.is_too_long) {
        (true, _) => Some("processor time"),
        (false, true) => Some("the size of a prompt"),
        (false, false) => None,
    };
    (result, exceeded)
}

/// Whether the render on this thread may write a text of this length in bytes. If not, it counts as
/// stopped.
pub(super) fn render_has_room(bytes: usize) -> bool {
    let render = RENDER.get();
    let fits = bytes <= render.bytes_max;
    if !fits {
        RENDER.set(Render { is_too_long: true, ..render });
    }
    fits
}

/// Whether the render on this thread must stop, because its time is over or no client waits for it.
pub(super) fn render_is_over() -> bool {
    let mut render = RENDER.get();
    render.checks = render.checks.wrapping_add(1);
    if render.checks.is_multiple_of(CHECKS_PER_CLOCK_READ) && !render.is_over {
        // Most renders end before the first reading of the clock.
        let max = WATCH.with_borrow(|watch| watch.as_ref().map(|watch| watch.template_max));
        if let Some(max) = max {
            let now = processor_time();
            let until = *render.until.get_or_insert(now.saturating_add(max));
            render.is_over = now >= until || is_abandoned();
        }
    }
    RENDER.set(render);
    render.is_over
}

/// The processor time that this thread has used.
fn processor_time() -> Duration {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    let seconds = u64::try_from(time.tv_sec).unwrap_or(0);
    Duration::new(seconds, u32::try_from(time.tv_nsec).unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn watch(template_max: Duration) -> (Watch, Arc<AtomicBool>) {
        let abandoned = Arc::new(AtomicBool::new(false));
        (Watch { abandoned: Some(Arc::clone(&abandoned)), template_max }, abandoned)
    }

    #[test]
    fn each_render_has_the_full_time() {
        let checks = || (0..100).any(|_| render_is_over());
        let rendering = |work: &dyn Fn() -> bool| {
            let (result, exceeded) = rendering(usize::MAX, work);
            (result, exceeded.is_some())
        };
        assert_eq!(rendering(&checks), (false, false), "no limit is set");
        with(watch(Duration::ZERO).0, || {
            assert_eq!(rendering(&checks), (true, true));
            assert_eq!(rendering(&|| true), (true, false), "another one");
        });
        with(watch(Duration::from_secs(3600)).0, || {
            assert_eq!(rendering(&checks), (false, false));
        });
        assert_eq!(rendering(&checks), (false, false), "the limits no longer apply");
    }

    #[test]
    fn a_render_ends_when_its_client_has_left() {
        let (watch, abandoned) = watch(Duration::from_secs(3600));
        with(watch, || {
            assert!(!is_abandoned());
            let (checks, stopped) = rendering(usize::MAX, || {
                (0..1000)
                    .take_while(|look| {
                        abandoned.store(*look >= 100, Relaxed);
                        !render_is_over()
                    })
                    .count()
            });
            assert!(
                stopped.is_some() && is_abandoned() && (100..200).contains(&checks),
                "{checks}"
            );
        });
        assert!(!is_abandoned());
    }
}
