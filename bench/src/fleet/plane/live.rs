//! What shims send while nothing changes: heartbeats, and replies to routers' questions.

use std::sync::atomic::Ordering;
use std::time::Duration;

use futures_util::StreamExt as _;
use prost::Message as _;
use splitrail_event_plane::names;
use splitrail_proto::v1;
use tokio::task::JoinSet;
use tokio::time::{MissedTickBehavior, interval};

use super::{Publishers, SEQUENCE, TAIL};
use crate::fleet::router::MODEL;
use crate::fleet::{Failure, script};

/// Signs of life of all workers are sent in so many groups, one after the other.
const GROUPS: usize = 100;

impl Publishers {
    /// Gives signs of life and answers questions until the set is dropped.
    pub(in crate::fleet) fn live(&self) -> JoinSet<()> {
        let mut living = JoinSet::new();
        let (reporting, answering) = (self.clone(), self.clone());
        living.spawn(async move {
            // Once the connection is closed there is nobody to tell.
            let _over = reporting.report().await;
        });
        living.spawn(async move {
            let _over = answering.answer().await;
        });
        living
    }

    async fn report(&self) -> Result<(), Failure> {
        let every = Duration::from_millis(u64::from(self.terms.load_interval_ms).max(100));
        let mut tick = interval(every / GROUPS as u32);
        tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            for group in 0..GROUPS {
                tick.tick().await;
                for at in (group..self.workers.len()).step_by(GROUPS) {
                    self.say(at).await?;
                }
            }
        }
    }

    /// A sign of life. Real ones say who they are once a second, and so is the interval.
    async fn say(&self, at: usize) -> Result<(), Failure> {
        let hello = &self.workers[at];
        let report = v1::PlaneReport {
            worker_id: hello.worker_id.clone(),
            instance_id: hello.instance_id.clone(),
            mirror_id: hello.mirror_id.clone(),
            sequence: Some(SEQUENCE + TAIL),
            load: Some(script::idle()),
            hello: Some(hello.clone()),
            terms: Some(self.terms.clone()),
            bye: None,
        };
        let subject = names::load(MODEL, &hello.worker_id);
        self.broker.client.publish(subject, report.encode_to_vec().into()).await?;
        Ok(())
    }

    async fn answer(&self) -> Result<(), Failure> {
        let all = names::ask_all(MODEL);
        let mut who = self.broker.client.subscribe(all.clone()).await?;
        let mut snapshots = self.broker.client.subscribe(format!("{all}.*")).await?;
        loop {
            tokio::select! {
                Some(_) = who.next() => {
                    for at in 0..self.workers.len() {
                        self.say(at).await?;
                    }
                }
                Some(asked) = snapshots.next() => {
                    let token = names::last(&asked.subject);
                    let is_asked = |hello: &v1::Hello| names::token(&hello.worker_id) == token;
                    let Some(at) = self.workers.iter().position(is_asked) else { continue };
                    self.asked.fetch_add(1, Ordering::Relaxed);
                    self.store(at).await?;
                    self.append(at, Vec::new()).await?;
                }
                else => return Ok(()),
            }
        }
    }

    /// Snapshots that a router has asked for so far.
    pub(in crate::fleet) fn asked(&self) -> u64 {
        self.asked.load(Ordering::Relaxed)
    }
}
