//! Stops the computation of a prompt whose client has left, or whose template takes too long.
//!
//! Prompts are computed off the reactor, where nothing can stop them from outside: so the computation itself
//! checks whether its client has left, and a template whether its time is over. A template
//! checks when it takes an item of a list, since long renders do this for each item.

use std::cell::{Cell, RefCell};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};

/// What one prompt may take, and whether anybody waits for it.
#[derive(Clone, Debug)]
pub struct Watch {
    /// Set once nobody waits for the prompt.
    pub abandoned: Option<Arc<AtomicBool>>,
    /// Processor time that its template may take.
    pub template_max: Duration,
}

/// Looks of which one asks the clock.
const LOOKS: u32 = 16;

thread_local! {
    static WATCH: RefCell<Option<Watch>> = const { RefCell::new(None) };
    static RENDER: Cell<Render> = const { Cell::new(Render::NONE) };
}

/// The render that runs on this thread.
#[derive(Clone, Copy)]
struct Render {
    looks: u32,
    /// The thread's processor time at which it must be over, once that is known.
    until: Option<Duration>,
    is_over: bool,
}

impl Render {
    const NONE: Self = Self { looks: 0, until: None, is_over: false };
}

/// Does work under a watch.
pub fn with<T>(watch: Watch, work: impl FnOnce() -> T) -> T {
    /// Takes the watch away, even from work that panics.
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

/// Whether nobody waits for what this thread does.
pub fn is_abandoned() -> bool {
    WATCH.with_borrow(|watch| {
        let abandoned = watch.as_ref().and_then(|watch| watch.abandoned.as_ref());
        abandoned.is_some_and(|abandoned| abandoned.load(Relaxed))
    })
}

/// Runs a render; says whether it was stopped.
pub(super) fn rendering<T>(render: impl FnOnce() -> T) -> (T, bool) {
    RENDER.set(Render::NONE);
    let result = render();
    (result, RENDER.get().is_over)
}

/// Whether the render on this thread must stop: it has had its time, or nobody waits for it.
pub(super) fn render_is_over() -> bool {
    let mut render = RENDER.get();
    render.looks = render.looks.wrapping_add(1);
    if render.looks.is_multiple_of(LOOKS) && !render.is_over {
        // Most renders end before the first of these looks: their time is not asked for.
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

/// The processor time that this thread has had.
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
    fn a_render_has_its_time_and_the_next_one_too() {
        let looks = || (0..100).any(|_| render_is_over());
        assert_eq!(rendering(looks), (false, false), "nobody watches");
        with(watch(Duration::ZERO).0, || {
            assert_eq!(rendering(looks), (true, true));
            assert_eq!(rendering(|| ()), ((), false), "another one");
        });
        with(watch(Duration::from_secs(3600)).0, || {
            assert_eq!(rendering(looks), (false, false));
        });
        assert_eq!(rendering(looks), (false, false), "the watch has ended");
    }

    #[test]
    fn a_render_ends_once_nobody_waits_for_it() {
        let (watch, abandoned) = watch(Duration::from_secs(3600));
        with(watch, || {
            assert!(!is_abandoned());
            let (looks, stopped) = rendering(|| {
                (0..1000)
                    .take_while(|look| {
                        abandoned.store(*look >= 100, Relaxed);
                        !render_is_over()
                    })
                    .count()
            });
            assert!(stopped && is_abandoned() && (100..200).contains(&looks), "{looks}");
        });
        assert!(!is_abandoned());
    }
}
