//! What the scripted shims send while no block changes: heartbeats, and replies to routers'
//! questions.

use std::sync::atomic::Ordering;
use std::time::Duration;

use futures_util::StreamExt as _;
use prost::Message as _;
use splitrail_event_plane::names;
use splitrail_proto::v1;
use tokio::task::JoinSet;
use tokio::time::{MissedTickBehavior, interval};

use super::{SEQUENCE, ScriptedPublishers, TAIL_MESSAGES};
use crate::fleet::router::MODEL;
use crate::fleet::{Failure, scripted_shim};

/// Number of groups into which the workers are divided. The heartbeats of the groups are spread
/// evenly over the load interval.
const GROUPS: usize = 100;

impl ScriptedPublishers {
    /// Sends heartbeats and answers questions until the set is dropped.
    pub(in crate::fleet) fn run(&self) -> JoinSet<()> {
        let mut running = JoinSet::new();
        let (reporting, answering) = (self.clone(), self.clone());
        running.spawn(async move {
            // An error means that the connection is closed.
            let _closed = reporting.send_heartbeats().await;
        });
        running.spawn(async move {
            let _closed = answering.answer_questions().await;
        });
        running
    }

    async fn send_heartbeats(&self) -> Result<(), Failure> {
        let load_interval = Duration::from_millis(u64::from(self.terms.load_interval_ms).max(100));
        let mut tick = interval(load_interval / GROUPS as u32);
        tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            for group in 0..GROUPS {
                tick.tick().await;
                for at in (group..self.workers.len()).step_by(GROUPS) {
                    self.send_heartbeat(at).await?;
                }
            }
        }
    }

    /// Sends one heartbeat. It contains the worker's identity, as a real shim's does once a second,
    /// which is also the default of `fleet.load_interval`.
    async fn send_heartbeat(&self, at: usize) -> Result<(), Failure> {
        let hello = &self.workers[at];
        let report = v1::PlaneReport {
            worker_id: hello.worker_id.clone(),
            instance_id: hello.instance_id.clone(),
            mirror_id: hello.mirror_id.clone(),
            sequence: Some(SEQUENCE + TAIL_MESSAGES),
            load: Some(scripted_shim::idle()),
            hello: Some(hello.clone()),
            terms: Some(self.terms.clone()),
            bye: None,
        };
        let subject = names::load(MODEL, &hello.worker_id);
        self.broker.client.publish(subject, report.encode_to_vec().into()).await?;
        Ok(())
    }

    async fn answer_questions(&self) -> Result<(), Failure> {
        let all = names::ask_all(MODEL);
        let mut identities = self.broker.client.subscribe(all.clone()).await?;
        let mut snapshots = self.broker.client.subscribe(format!("{all}.*")).await?;
        loop {
            tokio::select! {
                Some(_) = identities.next() => {
                    for at in 0..self.workers.len() {
                        self.send_heartbeat(at).await?;
                    }
                }
                Some(question) = snapshots.next() => {
                    let token = names::last(&question.subject);
                    let is_asked = |hello: &v1::Hello| names::token(&hello.worker_id) == token;
                    let Some(at) = self.workers.iter().position(is_asked) else { continue };
                    self.requested.fetch_add(1, Ordering::Relaxed);
                    self.store_snapshot(at).await?;
                    self.publish_events(at, Vec::new()).await?;
                }
                else => return Ok(()),
            }
        }
    }

    /// Number of snapshots that routers have requested so far.
    pub(in crate::fleet) fn snapshots_requested(&self) -> u64 {
        self.requested.load(Ordering::Relaxed)
    }
}
