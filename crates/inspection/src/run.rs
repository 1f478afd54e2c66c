//! Runs an inspection: all workers at the same time, up to a bound, and within a bounded time.

use std::time::Duration;

use futures_util::future::join_all;
use splitrail_config::model::{Config, GateKind, KvPath, Model, RequestFlow, Role};
use splitrail_engine::kv_events::LiveStream;
use splitrail_engine_client::hosts::Hosts;
use splitrail_engine_client::networks::Networks;
use splitrail_engine_client::{Engine, EngineClient};
use splitrail_prompt::PromptModel;
use tokio::sync::{Semaphore, SemaphorePermit};
use tokio::time::{Instant, timeout_at};

use crate::facts::{
    EventsFact, FetchOutcome, FetchedFact, ModelFacts, Reachability, ReplayFact, SourceFact,
    SourcesFact, StagedFact, TrialFact, WorkerFacts,
};
use crate::questions::trial::Staged;
use crate::questions::{Asker, events, hand_off, reports, shim, tokens, trial};
use crate::subject::{Subject, SubjectWorker};

/// Maximum time from the reply to a prompt until its KV events arrive.
const EVENTS_TIMEOUT: Duration = Duration::from_secs(2);
/// Maximum number of workers that are asked at the same time.
const WORKERS_AT_ONCE: usize = 32;

/// One model with what its inspection needs.
pub struct Subjects<'a> {
    /// The model's configuration.
    pub model: &'a Model,
    /// The client for its engines.
    pub client: EngineClient,
    /// Tokenizer and chat template, if a tokenizer is configured.
    pub prompt: Option<PromptModel>,
    /// The workers, listed ones first.
    pub workers: Vec<SubjectWorker>,
    /// The sources of workers that are not listed.
    pub sources: Vec<SourceFact>,
}

/// Inspects the engines of all models. It ends within `total`, whatever the engines do; what was not
/// asked by then stays untested.
pub async fn inspect(
    config: &Config,
    models: Vec<Subjects<'_>>,
    total: Duration,
) -> Vec<ModelFacts> {
    let deadline = Instant::now() + total;
    let turns = Semaphore::new(WORKERS_AT_ONCE);
    let networks = Networks::new(&config.fleet.networks);
    let inspected = models.into_iter().map(|subjects| {
        let (model, sources) = (subjects.model, subjects.sources);
        let mut facts: Vec<WorkerFacts> = Vec::new();
        let mut found = Vec::new();
        for worker in subjects.workers {
            facts.push(WorkerFacts::new(worker.config.clone(), worker.origin.clone()));
            found.push(Subject::new(worker));
        }
        let hosts = Hosts::new(found.iter().flatten().map(Engine::authority));
        let inspection = Inspection {
            model,
            client: subjects.client,
            prompt: subjects.prompt,
            networks: networks.clone(),
            hosts,
            deadline,
            turns: &turns,
        };
        async move {
            inspection.run(&mut facts, &found).await;
            ModelFacts { workers: facts, sources }
        }
    });
    join_all(inspected).await
}

/// Fills in where the engine publishes KV events if that is left out, as the router does.
fn ask_for_events(facts: &mut WorkerFacts) {
    if let SourcesFact::Listed(sources) = &facts.engine.sources
        && let Some(first) = sources.first().filter(|_| facts.config.asks_for_events())
    {
        facts.config.kv_events = Some(first.events.to_string());
        facts.config.kv_replay = first.replay.as_ref().map(ToString::to_string);
    }
}

/// The inspection of one model.
struct Inspection<'a> {
    model: &'a Model,
    client: EngineClient,
    prompt: Option<PromptModel>,
    networks: Networks,
    hosts: Hosts,
    deadline: Instant,
    turns: &'a Semaphore,
}

impl Inspection<'_> {
    async fn run(&self, facts: &mut [WorkerFacts], subjects: &[Option<Subject>]) {
        let each = facts.iter_mut().zip(subjects).map(|(facts, subject)| async move {
            let subject = subject.as_ref()?;
            let _turn = self.turn().await?;
            self.one(subject, facts).await
        });
        let mut staged = join_all(each).await;
        self.pairs(facts, subjects, &mut staged).await;
    }

    /// Waits until a worker may be asked; `None` if the time is over by then.
    async fn turn(&self) -> Option<SemaphorePermit<'_>> {
        let turn = timeout_at(self.deadline, self.turns.acquire()).await.ok()?.ok()?;
        // Turns that end with the time would be given to others.
        (Instant::now() < self.deadline).then_some(turn)
    }

    fn asker<'s>(&'s self, subject: &'s Subject) -> Asker<'s> {
        Asker { client: &self.client, subject, kind: self.model.engine(), deadline: self.deadline }
    }

    /// Asks one worker everything that needs no other worker. Returns the hand-off that it staged.
    async fn one(&self, subject: &Subject, facts: &mut WorkerFacts) -> Option<Staged> {
        if subject.is_guarded() && !self.networks.admit_host(subject.host()) {
            facts.reach = Reachability::Outside;
            return None;
        }
        let asker = self.asker(subject);
        reports::ask(&asker, facts).await;
        if facts.config.shim && facts.reach != Reachability::Outside {
            facts.shim = shim::status(&asker).await;
        }
        if !facts.is_reached() {
            return None;
        }
        ask_for_events(facts);
        if self.model.connector.has_bootstrap() && facts.config.role != Role::Decode {
            facts.bootstrap = shim::bootstrap(&asker, self.model.connector).await;
        }
        // An engine refuses every prompt for a model that it does not serve.
        let name = &self.model.name;
        let served = facts.engine.model(name)?;
        let text = trial::text(facts.engine.block_size, served.context_tokens);
        let subscription = events::subscription(&asker, &facts.config, &self.networks);
        let prompt = self.prompt.as_ref();
        let (chat, (plain, engine_tokens), listened, replay) = tokio::join!(
            tokens::of_chat(&asker, self.model, prompt),
            tokens::of_text(&asker, self.model, prompt, &text),
            async {
                let subscription = subscription.as_ref()?;
                Some(events::listen(subscription).await)
            },
            async {
                let subscription = subscription.as_ref()?;
                Some(events::replay(subscription).await)
            },
        );
        (facts.chat_tokens, facts.text_tokens) = (chat, plain);
        facts.replay = replay.unwrap_or(ReplayFact::Untested);
        let staged = self.serve(&asker, facts, text).await;
        facts.events = match (listened, &facts.trial) {
            (None, _) => EventsFact::Untested,
            (Some(Err(fact)), _) => fact,
            (Some(Ok(mut stream)), TrialFact::Served { .. }) => {
                self.arrival(&asker, facts, &mut stream, engine_tokens).await
            }
            (Some(Ok(_)), _) => EventsFact::Connected,
        };
        staged
    }

    /// Waits for the events of the prompt that was served; if they do not come, of a second one: a
    /// publisher drops what it sends before it has seen a new subscription.
    async fn arrival(
        &self,
        asker: &Asker<'_>,
        facts: &WorkerFacts,
        stream: &mut LiveStream,
        tokens: Option<Vec<u32>>,
    ) -> EventsFact {
        let until = asker.until(EVENTS_TIMEOUT);
        let first = events::arrival(stream, tokens.as_deref(), until).await;
        if !matches!(first, EventsFact::Silent | EventsFact::OfAnother) {
            return first;
        }
        let name = &self.model.name;
        let context_tokens = facts.engine.model(name).and_then(|model| model.context_tokens);
        let text = trial::text(facts.engine.block_size, context_tokens);
        let (_, tokens) = tokens::of_text(asker, self.model, None, &text).await;
        trial::serve(asker, name, &text).await;
        let until = asker.until(EVENTS_TIMEOUT);
        let second = events::arrival(stream, tokens.as_deref(), until).await;
        match second {
            EventsFact::Silent | EventsFact::OfAnother
                if self.is_of_any_rank(asker, facts).await =>
            {
                EventsFact::Connected
            }
            second => second,
        }
    }

    /// Whether the events of a prompt may be published by another rank than the first one, because
    /// the engine has several and chooses by itself.
    async fn is_of_any_rank(&self, asker: &Asker<'_>, facts: &WorkerFacts) -> bool {
        let Some(ranks) = facts.engine.ranks.filter(|ranks| *ranks > 1) else { return false };
        trial::takes_rank(asker, &self.model.name, ranks).await != Some(true)
    }

    /// Lets the engine serve the text, as the prefill leg of a hand-off if it prefills.
    async fn serve(
        &self,
        asker: &Asker<'_>,
        facts: &mut WorkerFacts,
        text: String,
    ) -> Option<Staged> {
        let name = &self.model.name;
        // An engine of such a pair never answers one leg alone.
        if !self.model.connector.serves_alone() {
            return None;
        }
        if matters_threshold(self.model, facts) {
            facts.supports_cache_hit_threshold = trial::threshold(asker, name).await;
        }
        // An engine that pulls would be ended by the decode leg of a push, so that decode engines are
        // asked as well which one they are.
        let stages = match self.model.connector.kv_path() {
            KvPath::Pulled => facts.config.role != Role::Decode,
            KvPath::Pushed => true,
            KvPath::None | KvPath::Stored | KvPath::Matched => false,
        };
        if !stages {
            facts.trial = trial::serve(asker, name, &text).await;
            return None;
        }
        let networks = &self.model.hand_off_networks;
        let is_allowed = |host: &str, peer| self.hosts.admit(host, peer, networks);
        let staged;
        let connector = self.model.connector;
        (facts.trial, facts.staged, staged) =
            trial::stage(asker, name, text, connector, is_allowed).await;
        staged.filter(|_| facts.config.role != Role::Decode)
    }

    /// Hands over from each prefill worker and to each decode worker at least once, between workers that
    /// store KV alike. Notes those that have no partner.
    async fn pairs(
        &self,
        facts: &mut [WorkerFacts],
        subjects: &[Option<Subject>],
        staged: &mut [Option<Staged>],
    ) {
        let prefill: Vec<usize> = (0..facts.len()).filter(|at| staged[*at].is_some()).collect();
        let pushes = self.model.connector.kv_path() == KvPath::Pushed;
        let serves = |at: &usize| {
            facts[*at].config.role != Role::Prefill
                && matches!(facts[*at].trial, TrialFact::Served { .. })
                && (!pushes || facts[*at].staged == StagedFact::Usable)
        };
        let decode: Vec<usize> = (0..facts.len()).filter(serves).collect();
        let connector = self.model.connector;
        let fits = |from: usize, to: usize| facts[to].stores_alike(&facts[from], connector);
        let pairs = pairs(&prefill, &decode, fits);
        note_unpaired(facts, &prefill, &decode, &pairs);
        let fetches = pairs.into_iter().filter_map(|(from, to)| {
            let (source, target) = (subjects[from].as_ref()?, subjects[to].as_ref()?);
            let ready = staged[from].take();
            Some(async move {
                let Some(_turn) = self.turn().await else {
                    return (from, to, FetchOutcome::Untested("the time was over"));
                };
                (from, to, self.fetch(source, target, ready).await)
            })
        });
        let fetches: Vec<_> = fetches.collect();
        for (from, to, outcome) in join_all(fetches).await {
            let from = facts[from].config.id.clone();
            facts[to].fetched.push(FetchedFact { from, outcome });
        }
    }

    /// Hands over once; stages a prompt first unless that was done.
    async fn fetch(
        &self,
        source: &Subject,
        target: &Subject,
        ready: Option<Staged>,
    ) -> FetchOutcome {
        let name = &self.model.name;
        let connector = self.model.connector;
        // A decode engine would wait for ever for KV that is pushed by a lease that has ended.
        let staged = match ready.filter(|_| connector.kv_path() != KvPath::Pushed) {
            Some(staged) => staged,
            None => {
                let networks = &self.model.hand_off_networks;
                let is_allowed = |host: &str, peer| self.hosts.admit(host, peer, networks);
                let text = trial::text(None, None);
                let asker = self.asker(source);
                let again = trial::stage(&asker, name, text, connector, is_allowed).await;
                let (_, _, Some(staged)) = again else {
                    return FetchOutcome::Untested("the prefill worker staged nothing more");
                };
                staged
            }
        };
        hand_off::fetch(&self.asker(target), &self.asker(source), name, staged).await
    }
}

/// Pairs of a prefill and a decode worker in which each of both occurs, if it fits to one other than
/// itself.
fn pairs(
    prefill: &[usize],
    decode: &[usize],
    fits: impl Fn(usize, usize) -> bool,
) -> Vec<(usize, usize)> {
    let is_pair = |from: usize, to: usize| from != to && fits(from, to);
    let of_prefill = |(at, from): (usize, &usize)| {
        let to = from_place(decode, at).find(|to| is_pair(*from, *to))?;
        Some((*from, to))
    };
    let mut pairs: Vec<_> = prefill.iter().enumerate().filter_map(of_prefill).collect();
    for (at, to) in decode.iter().enumerate() {
        let is_paired = pairs.iter().any(|(_, other)| other == to);
        let from = from_place(prefill, at).find(|from| is_pair(*from, *to));
        pairs.extend(from.filter(|_| !is_paired).map(|from| (from, *to)));
    }
    pairs
}

/// The workers from this place on, and then those before it, so that partners take turns.
fn from_place(workers: &[usize], place: usize) -> impl Iterator<Item = usize> {
    let (before, after) = workers.split_at(place % workers.len().max(1));
    after.iter().chain(before).copied()
}

/// Notes of each worker that is in no pair with which workers it could have been in one.
fn note_unpaired(
    facts: &mut [WorkerFacts],
    prefill: &[usize],
    decode: &[usize],
    pairs: &[(usize, usize)],
) {
    let ids: Vec<String> = facts.iter().map(|worker| worker.config.id.clone()).collect();
    let others = |of: usize, workers: &[usize]| -> Vec<String> {
        workers.iter().filter(|other| **other != of).map(|other| ids[*other].clone()).collect()
    };
    for from in prefill {
        if pairs.iter().all(|(paired, _)| paired != from) {
            facts[*from].without_taker = others(*from, decode);
        }
    }
    for to in decode {
        if pairs.iter().all(|(_, paired)| paired != to) {
            facts[*to].without_source = others(*to, prefill);
        }
    }
}

/// Whether it matters if the engine supports `cache_hit_threshold`.
fn matters_threshold(model: &Model, facts: &WorkerFacts) -> bool {
    let gated = |flow: RequestFlow| {
        matches!(flow, RequestFlow::DecodeFirst | RequestFlow::DecodeOnly | RequestFlow::Auto)
    };
    let flows = std::iter::once(RequestFlow::from(model.flow)).chain(model.request_flows.clone());
    let is_asked = matches!(model.gate.kind, GateKind::Auto | GateKind::Engine);
    facts.config.role != Role::Prefill && is_asked && flows.into_iter().any(gated)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_worker_hands_over_or_fetches_at_least_once() {
        for (prefill, decode, expected) in [
            (&[0][..], &[1][..], &[(0, 1)][..]),
            (&[0, 1], &[2], &[(0, 2), (1, 2)]),
            (&[0], &[1, 2, 3], &[(0, 1), (0, 2), (0, 3)]),
            (&[0, 1], &[0, 1], &[(0, 1), (1, 0)]),
            (&[0], &[0], &[]),
            (&[], &[1], &[]),
            (&[0], &[], &[]),
        ] {
            assert_eq!(pairs(prefill, decode, |_, _| true), expected);
        }
    }

    #[test]
    fn workers_are_paired_with_others_that_they_fit_to() {
        // Even and odd workers do not fit to each other.
        let fits = |from: usize, to: usize| from % 2 == to % 2;
        for (prefill, decode, expected) in [
            (&[0, 1][..], &[3, 2][..], &[(0, 2), (1, 3)][..]),
            (&[0, 1], &[3, 5, 2], &[(0, 2), (1, 5), (1, 3)]),
            (&[0, 1, 2], &[4], &[(0, 4), (2, 4)]),
            (&[0, 1], &[0, 1], &[]),
            (&[1], &[2, 3, 4], &[(1, 3)]),
        ] {
            assert_eq!(pairs(prefill, decode, fits), expected);
        }
    }
}
