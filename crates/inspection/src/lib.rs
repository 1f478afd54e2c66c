//! The inspection of a configuration's engines: asks each engine what it is and what it can do, and
//! says what does not fit the configuration or the other engines.
//!
//! Three parts: questions to engines, all of them with a timeout and a bound on the reply
//! ([`inspect`]); what they found out, as typed facts ([`facts`]); and pure functions from facts and
//! configuration to findings, each with a remedy ([`finding`]). Nothing here changes an engine, except
//! that each engine serves a few small prompts.

mod confirmations;
pub mod facts;
pub mod finding;
mod findings;
mod questions;
mod run;
mod subject;

pub use confirmations::confirmations;
pub use facts::{ModelFacts, SourceFact, SourceState, WorkerFacts};
pub use finding::{Finding, FindingKind, Severity};
pub use findings::findings;
pub use run::{Subjects, inspect};
pub use subject::{Origin, SubjectWorker};
