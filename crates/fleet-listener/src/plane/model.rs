//! One model on the event plane: the state that its tasks share.

use std::sync::Arc;

use prost::Message as _;
use splitrail_event_plane::Broker;
use splitrail_proto::v1;
use tokio::sync::Semaphore;

use super::slots::Slots;
use super::terms;
use crate::context::AttachContext;
use splitrail_config::model::NatsEvents;

/// One model on the event plane.
pub(super) struct PlaneModel {
    pub(super) context: Arc<AttachContext>,
    pub(super) broker: Broker,
    pub(super) config: Arc<NatsEvents>,
    /// The name of the model in the configuration.
    pub(super) name: String,
    pub(super) durable: String,
    pub(super) slots: Slots,
    pub(super) fetching: Arc<Semaphore>,
}

impl PlaneModel {
    /// Publishes a request to shims.
    pub(super) async fn ask(&self, subject: String, reason: &str) {
        let who = self.context.router_id.clone();
        let ask = v1::PlaneAsk { who, reason: reason.to_owned(), model: self.name.clone() };
        let payload = ask.encode_to_vec().into();
        if let Err(error) = self.broker.client.publish(subject, payload).await {
            tracing::debug!(%error, "cannot publish to the broker");
        }
    }

    /// How this router hashes the model's blocks. The block size is 0 if it is that of the engines.
    pub(super) fn terms(&self) -> Option<v1::Welcome> {
        let serving = self.context.cluster.serving();
        Some(terms::of(&self.context, serving.model(&self.name)?))
    }

    pub(super) fn count_refused(&self, reason: &str) {
        let refused = &self.context.cluster.metrics.event_plane_refused;
        refused.with_label_values(&[self.name.as_str(), reason]).inc();
    }

    pub(super) fn count_message(&self, kind: &str) {
        let messages = &self.context.cluster.metrics.event_plane_messages;
        messages.with_label_values(&[self.name.as_str(), kind]).inc();
    }

    pub(super) fn count_snapshot(&self, result: &str) {
        let snapshots = &self.context.cluster.metrics.event_plane_snapshots;
        snapshots.with_label_values(&[self.name.as_str(), result]).inc();
    }
}
