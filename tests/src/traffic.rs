//! Continuous requests to several routers; each reply is compared with the right one.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use rand::rngs::StdRng;
use rand::seq::IndexedRandom;
use rand::{RngExt, SeedableRng};
use serde_json::Value;
use tokio::sync::watch;
use tokio::task::JoinSet;

use crate::client::{Broken, Client, Reply, streamed_text, whole_text};
use crate::trial::{CHAT, COMPLETIONS, Reference, chat, completion, prompt, streamed};

/// Prompts that differ; some begin alike.
const PROMPTS: usize = 24;

/// Failed requests whose reasons are kept.
const KEPT: usize = 200;

/// What became of the requests so far.
#[derive(Debug, Default)]
pub struct Tally {
    /// Answered, and rightly.
    pub right: AtomicU64,
    /// Refused or broken off, and said so.
    pub told: AtomicU64,
    /// Connections that could not be had or broke off.
    pub broken: AtomicU64,
    /// What must never be: wrong answers, answers without an end, silence.
    pub wrong: Mutex<Vec<String>>,
    /// The reasons of the first failures, including connections that broke off.
    pub first_failures: Mutex<Vec<String>>,
}

/// Clients that send one request after the other. Dropped, they stop.
pub struct Traffic {
    /// What became of it.
    pub tally: Arc<Tally>,
    paused: watch::Sender<bool>,
    busy: Arc<AtomicU64>,
    _clients: JoinSet<()>,
}

/// One request with its only right answer.
#[derive(Clone)]
struct Question {
    path: &'static str,
    body: Value,
    answer: String,
}

impl Traffic {
    /// So many clients of these routers. Each asks any of the routers that say that they are
    /// ready, as behind a balancer.
    pub async fn start(routers: &[SocketAddr], clients: usize, seed: u64) -> Self {
        Self::with_prompts(PROMPTS, routers, clients, seed).await
    }

    /// The same, with this many different prompts.
    pub async fn with_prompts(
        prompts: usize,
        routers: &[SocketAddr],
        clients: usize,
        seed: u64,
    ) -> Self {
        let questions = Arc::new(questions(prompts).await);
        let ready: Arc<Vec<(SocketAddr, AtomicBool)>> =
            Arc::new(routers.iter().map(|router| (*router, AtomicBool::new(true))).collect());
        let (tally, busy) = (Arc::new(Tally::default()), Arc::new(AtomicU64::new(0)));
        let (paused, _) = watch::channel(false);
        let mut tasks = JoinSet::new();
        tasks.spawn(balance(Arc::clone(&ready)));
        for client in 0..clients {
            let asking = Asking {
                questions: Arc::clone(&questions),
                ready: Arc::clone(&ready),
                tally: Arc::clone(&tally),
                busy: Arc::clone(&busy),
                rng: StdRng::seed_from_u64(seed ^ (client as u64) << 32),
            };
            tasks.spawn(asking.run(paused.subscribe()));
        }
        Self { tally, paused, busy, _clients: tasks }
    }

    /// No new requests; waits until those under way have ended.
    pub async fn pause(&self) {
        self.paused.send_replace(true);
        while self.busy.load(Relaxed) > 0 {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }

    /// Goes on.
    pub fn go_on(&self) {
        self.paused.send_replace(false);
    }

    /// Fails if anything was wrong.
    pub fn check(&self) {
        let wrong = self.tally.wrong.lock().expect("a list");
        assert!(wrong.is_empty(), "{} wrong: {:#?}", wrong.len(), &wrong[..wrong.len().min(5)]);
    }

    /// Fails if any request was not answered.
    pub fn check_all_answered(&self) {
        self.check();
        let told = self.tally.first_failures.lock().expect("a list");
        assert!(told.is_empty(), "{} failed: {:#?}", told.len(), &told[..told.len().min(5)]);
    }
}

/// Asks the routers whether they are ready, as a balancer does.
async fn balance(ready: Arc<Vec<(SocketAddr, AtomicBool)>>) {
    loop {
        for (router, is) in ready.iter() {
            let asked = Client::new(*router).try_get("/ready").await;
            is.store(asked.is_ok_and(|reply| reply.status == 200), Relaxed);
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

struct Asking {
    questions: Arc<Vec<Question>>,
    ready: Arc<Vec<(SocketAddr, AtomicBool)>>,
    tally: Arc<Tally>,
    busy: Arc<AtomicU64>,
    rng: StdRng,
}

impl Asking {
    async fn run(mut self, mut paused: watch::Receiver<bool>) {
        let mut clients: HashMap<SocketAddr, Client> = HashMap::new();
        loop {
            if paused.wait_for(|paused| !paused).await.is_err() {
                return;
            }
            self.busy.fetch_add(1, Relaxed);
            // Paused just now: what is seen as nobody busy must stay so.
            if !*paused.borrow() {
                self.ask(&mut clients).await;
            }
            self.busy.fetch_sub(1, Relaxed);
        }
    }

    async fn ask(&mut self, clients: &mut HashMap<SocketAddr, Client>) {
        let up: Vec<_> =
            self.ready.iter().filter(|(_, is)| is.load(Relaxed)).map(|(at, _)| *at).collect();
        let Some(router) = up.choose(&mut self.rng).copied() else {
            tokio::time::sleep(Duration::from_millis(20)).await;
            return;
        };
        let question = self.questions.choose(&mut self.rng).expect("questions").clone();
        let streams = self.rng.random_bool(0.5);
        let body = if streams { streamed(&question.body) } else { question.body.clone() };
        let client = clients.entry(router).or_insert_with(|| Client::new(router));
        match client.try_post(question.path, &body).await {
            Err(Broken::Hang) => self.wrong(format!("no answer from {router}")),
            Err(Broken::Connection(why)) => {
                self.tally.broken.fetch_add(1, Relaxed);
                // Until it says that it is ready again.
                let gone = self.ready.iter().find(|(at, _)| *at == router);
                gone.into_iter().for_each(|(_, is)| is.store(false, Relaxed));
                self.failed(format!("{router}: {why}"));
            }
            Ok(reply) if streams => self.judge_stream(&question, &reply),
            Ok(reply) => self.judge(&question, &reply),
        }
    }

    fn judge(&self, question: &Question, reply: &Reply) {
        if reply.status != 200 {
            return self.refused(reply);
        }
        match whole_text(&reply.json(), 0) {
            text if text == question.answer => _ = self.tally.right.fetch_add(1, Relaxed),
            text => self.wrong(format!(
                "{text:?} in place of {:?}: {}",
                question.answer,
                reply.header("x-splitrail-route")
            )),
        }
    }

    fn judge_stream(&self, question: &Question, reply: &Reply) {
        if reply.status != 200 {
            return self.refused(reply);
        }
        let text = reply.text();
        let events: Vec<&str> =
            text.split("\n\n").filter_map(|event| event.strip_prefix("data: ")).collect();
        let is_done = events.last() == Some(&"[DONE]");
        let chunks: Vec<Value> =
            events.iter().filter_map(|event| serde_json::from_str(event).ok()).collect();
        let error = chunks.iter().find(|chunk| chunk.get("error").is_some());
        match (error, is_done) {
            (Some(error), _) => {
                self.tally.told.fetch_add(1, Relaxed);
                self.failed(format!("an error event: {error}"));
            }
            (None, true) if streamed_text(&chunks, 0) == question.answer => {
                self.tally.right.fetch_add(1, Relaxed);
            }
            (None, true) => self.wrong(format!(
                "{:?} in place of {:?}",
                streamed_text(&chunks, 0),
                question.answer
            )),
            (None, false) => self.wrong(format!("a stream without an end: {text:?}")),
        }
    }

    fn refused(&self, reply: &Reply) {
        self.tally.told.fetch_add(1, Relaxed);
        let has_shape = serde_json::from_slice::<Value>(&reply.body)
            .is_ok_and(|body| body["error"]["message"].is_string());
        if !has_shape || reply.status.is_client_error() {
            return self.wrong(format!("{}: {}", reply.status, reply.text()));
        }
        self.failed(format!("{}: {}", reply.status, reply.text()));
    }

    fn failed(&self, what: String) {
        let mut told = self.tally.first_failures.lock().expect("a list");
        if told.len() < KEPT {
            told.push(what);
        }
    }

    fn wrong(&self, what: String) {
        self.tally.wrong.lock().expect("a list").push(what);
    }
}

/// Prompts of which three at a time begin alike, with what an engine alone says to each.
async fn questions(prompts: usize) -> Vec<Question> {
    let reference = Reference::start().await;
    let mut questions = Vec::new();
    for number in 0..prompts {
        let shared = prompt(60, &format!("group{}-", number / 3));
        let text = format!("{shared} {}", prompt(10 + number % PROMPTS, &format!("own{number}-")));
        let (path, body) = match number % 2 {
            0 => (COMPLETIONS, completion(&text)),
            _ => (CHAT, chat(&text)),
        };
        let answer = reference.text(path, &body).await;
        questions.push(Question { path, body, answer });
    }
    questions
}
