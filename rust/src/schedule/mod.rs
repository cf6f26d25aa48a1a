//! What a round drafts and verifies.
//!
//! There are three policies. `fixed` drafts and verifies all it can; `threshold` stops before the first
//! doubtful token and needs no knowledge of the machine; `throughput` weighs each token's chance of being
//! kept against what the round really costs (paper, section 3.2.2), before the draft ([`choose`]: which
//! requests draft, and how far) and after it ([`plan`]: what is verified). It learns from past rounds: what
//! rounds cost ([`live`]), how drafts fare ([`track`]), how far the confidences are off (`correction`).
//!
//! Exactness rests on one rule (paper, Appendix A): whether a token is drafted or verified must not depend on
//! the token itself. Any decision may depend on past rounds. Within a round, [`plan`] has a search that never
//! looks ahead, and an unconstrained one that can only be called with a [`plan::Foresight`]; [`delayed`] has
//! a search whose budget comes from earlier rounds.

pub mod choose;
mod correction;
pub mod cost;
mod curve;
pub mod delayed;
pub mod depths;
mod fit;
pub mod live;
pub mod plan;
pub mod planner;
pub mod policy;
pub mod threshold;
pub mod track;

pub use choose::{Choice, Hope, choose};
pub use cost::{CostError, CostTable};
pub use delayed::DelayedSearch;
pub use depths::{Depth, Prospect};
pub use live::{LiveCosts, RoundTime};
pub use plan::{Draft, Foresight, PlanError, Survivals, causal, fixed, global, patient};
pub use planner::{Lesson, Planner};
pub use policy::{Policy, Skip, Skipped};
pub use threshold::threshold_prefix;
pub use track::{Outcome, Track};
