//! How many drafted tokens a round verifies.
//!
//! Three policies. `fixed` verifies what was drafted; `threshold` stops before the first doubtful token
//! and needs no knowledge of the machine; `throughput` weighs each token's chance of being kept
//! against what the target pass really costs (paper, section 3.2.2).
//!
//! Exactness rests on one rule (paper, Appendix A): whether a token is verified must not depend on the
//! token itself. [`plan`] therefore has a search that never looks ahead, a search whose budget comes
//! from earlier rounds, and an unconstrained one that can only be called with a [`plan::Foresight`].

pub mod cost;
pub mod plan;
pub mod policy;
pub mod threshold;

pub use cost::{CostError, CostTable};
pub use plan::{DelayedSearch, Draft, Foresight, PlanError, Survivals, causal, fixed, global};
pub use policy::{Planner, Policy};
pub use threshold::threshold_prefix;
