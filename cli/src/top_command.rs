//! `splitrail top`: a live view of one or several routers and their workers.

use std::io::{self, IsTerminal};
use std::time::Duration;

use clap::Args;
use splitrail_settings::command::{Failure, exit};
use tokio::signal::unix::{SignalKind, signal};
use tokio::time::{Instant, timeout_at};

use crate::admin::{AdminArgs, AskError, Replica};
use crate::cluster::{known_model, worst_code};
use crate::output::Output;

mod figures;
mod frame;
mod grid;
mod live;
mod options;
mod terminal;
mod view;
mod watch;

use frame::Paint;
use options::{Action, Options, Sort};
use terminal::{Keys, Screen};
use view::{Router, View};
use watch::{Update, Watch};

/// Time for the first snapshots of `--once`.
const FIRST_SNAPSHOT: Duration = Duration::from_secs(10);

/// Width of a frame of `--once` without a terminal.
const ONCE_COLUMNS: u16 = 100;

/// The arguments.
#[derive(Args)]
pub(crate) struct TopArgs {
    /// Shows the workers and decisions of this model only.
    #[arg(long, value_name = "NAME")]
    model: Option<String>,
    /// The order of the workers of a pool.
    #[arg(long, value_enum, default_value_t)]
    sort: Sort,
    /// Prints one frame as text, with all workers, and ends.
    #[arg(long)]
    once: bool,
    #[command(flatten)]
    admin: AdminArgs,
}

/// Runs the view until the person at the keyboard ends it; with `--once`, returns a frame.
///
/// # Errors
/// The replicas cannot be named, there is no terminal, or no replica serves the model.
pub(crate) async fn run(args: TopArgs) -> Result<Option<Output>, Failure> {
    let replicas = args.admin.replicas().await?;
    let options = Options { sort: args.sort, model: args.model, ..Options::default() };
    if args.once {
        return Ok(Some(once(&replicas, &options).await?));
    }
    if !io::stdout().is_terminal() || !io::stdin().is_terminal() {
        let message = "`top` needs a terminal; `--once` prints one frame as text";
        return Err(Failure::new(exit::USAGE, message));
    }
    watch(&replicas, options).await?;
    Ok(None)
}

/// The routers before anything is known of them.
fn unknown(replicas: &[Replica]) -> Vec<Router> {
    let router = |replica: &Replica| Router { name: replica.name(), ..Router::default() };
    replicas.iter().map(router).collect()
}

/// Notes what is new of a router.
fn note(routers: &mut [Router], update: Update) {
    let router = &mut routers[update.replica];
    match update.news {
        Ok(snapshot) => (router.snapshot, router.error) = (Some(snapshot), None),
        Err(error) => {
            (router.snapshot, router.error) = (None, Some(error.message().to_owned()));
        }
    }
}

/// Checks the chosen model once all routers have said which models they serve.
///
/// # Errors
/// None of them serves it.
fn check_model(routers: &[Router], options: &Options) -> Result<(), Failure> {
    match &options.model {
        Some(model) if routers.iter().all(|router| router.snapshot.is_some()) => {
            let served = View::new(routers, options).models;
            known_model(model, served.into_iter().map(str::to_owned))
        }
        _ => Ok(()),
    }
}

/// One frame as text, when all replicas have answered or failed to.
///
/// # Errors
/// All replicas have answered, and none serves the chosen model.
async fn once(replicas: &[Replica], options: &Options) -> Result<Output, Failure> {
    let mut routers = unknown(replicas);
    let mut errors: Vec<Option<AskError>> = vec![None; replicas.len()];
    let mut watch = Watch::start(replicas);
    let until = Instant::now() + FIRST_SNAPSHOT;
    let is_known = |router: &Router| router.snapshot.is_some() || router.error.is_some();
    while !routers.iter().all(is_known) {
        let Ok(Some(update)) = timeout_at(until, watch.next()).await else { break };
        errors[update.replica] = update.news.as_ref().err().cloned();
        note(&mut routers, update);
    }
    for (router, error) in routers.iter_mut().zip(&mut errors) {
        if !is_known(router) {
            router.error = Some("no snapshot in time".to_owned());
            *error = Some(AskError::silent(&router.name));
        }
    }
    check_model(&routers, options)?;
    let view = View::new(&routers, options);
    let width = match io::stdout().is_terminal() {
        true => terminal::width().unwrap_or(ONCE_COLUMNS),
        false => ONCE_COLUMNS,
    };
    let mut text = frame::text(&view, options, width);
    for error in errors.iter().flatten() {
        text += &format!("\n{error}");
    }
    Ok(Output { text, code: worst_code(errors.iter().flatten(), 0) })
}

/// What happened while the view was waiting.
enum TopEvent {
    Action(Option<Action>),
    Update(Option<Update>),
    Stop,
}

/// Draws frames until the person at the keyboard, or a signal, ends the view.
///
/// # Errors
/// The terminal cannot be used, or no replica serves the model of the command line.
async fn watch(replicas: &[Replica], mut options: Options) -> Result<(), Failure> {
    let mut routers = unknown(replicas);
    let mut stream = Watch::start(replicas);
    let mut terminate = signal(SignalKind::terminate())?;
    let mut hang_up = signal(SignalKind::hangup())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    let paint = Paint { has_colour: std::env::var_os("NO_COLOR").is_none_or(|it| it.is_empty()) };
    // Restores the terminal when it goes out of scope, in a panic too.
    let mut screen = Screen::open()?;
    let mut keys = Keys::start();
    // What is shown while the view is paused.
    let mut frozen: Option<Vec<Router>> = None;
    // A model that was found, or chosen by a key, may be removed later.
    let mut is_checked = false;
    loop {
        let shown = frozen.as_ref().unwrap_or(&routers);
        screen.draw(&View::new(shown, &options), &options, paint)?;
        let happening = tokio::select! {
            action = keys.next() => TopEvent::Action(action),
            update = stream.next() => TopEvent::Update(update),
            _ = terminate.recv() => TopEvent::Stop,
            _ = hang_up.recv() => TopEvent::Stop,
            _ = interrupt.recv() => TopEvent::Stop,
        };
        match happening {
            TopEvent::Stop
            | TopEvent::Action(None | Some(Action::Quit))
            | TopEvent::Update(None) => return Ok(()),
            TopEvent::Action(Some(action)) => {
                if action == Action::Redraw {
                    screen.clear();
                }
                is_checked |= action == Action::Model;
                let models = View::new(shown, &options).models;
                options.apply(action, &models);
                if !options.is_paused {
                    frozen = None;
                } else if frozen.is_none() {
                    frozen = Some(routers.clone());
                }
            }
            TopEvent::Update(Some(update)) => {
                note(&mut routers, update);
                // One frame for all that has come.
                while let Some(update) = stream.try_next() {
                    note(&mut routers, update);
                }
                if !is_checked {
                    check_model(&routers, &options)?;
                    is_checked = routers.iter().all(|router| router.snapshot.is_some());
                }
            }
        }
    }
}

#[cfg(test)]
mod tests;
