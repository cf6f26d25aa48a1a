//! The architecture that kernels are compiled for, and its name.

use std::fmt;
use std::str::FromStr;

use crate::cuda::CudaError;

/// A compute capability, and whether instructions specific to that generation are allowed, as in `sm_90a`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Architecture {
    pub(super) capability: u32,
    specific: bool,
}

impl Architecture {
    /// The oldest capability that has all that the kernels use (bfloat16 conversions).
    pub const OLDEST: u32 = 80;

    /// Capabilities of systems on a chip, whose code other devices do not run.
    const INTEGRATED: [u32; 3] = [87, 88, 101];

    /// The architecture of a device of this compute capability (8.9 is 89).
    pub fn of_device(capability: u32) -> Self {
        Architecture { capability, specific: capability == 90 || capability / 10 == 10 }
    }

    /// The newest of `known` capabilities whose code a device of this one runs: of the same major version and
    /// no newer. Instructions specific to a generation are allowed only if it is the device's own.
    pub(super) fn nearest(capability: u32, known: impl IntoIterator<Item = u32>) -> Option<Self> {
        let runs = |&other: &u32| {
            other == capability
                || other / 10 == capability / 10
                    && (Self::OLDEST..capability).contains(&other)
                    && !Self::INTEGRATED.contains(&other)
        };
        let found = known.into_iter().filter(runs).max()?;
        let exact = Self::of_device(capability);
        Some(if found == capability { exact } else { Architecture { capability: found, specific: false } })
    }
}

impl fmt::Display for Architecture {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "sm_{}{}", self.capability, if self.specific { "a" } else { "" })
    }
}

impl FromStr for Architecture {
    type Err = CudaError;

    fn from_str(text: &str) -> Result<Self, CudaError> {
        let number = text.strip_prefix("sm_").map(|rest| (rest.trim_end_matches('a'), rest.ends_with('a')));
        match number.and_then(|(digits, specific)| Some((digits.parse().ok()?, specific))) {
            Some((capability, specific)) if (Self::OLDEST..1000).contains(&capability) => {
                Ok(Architecture { capability, specific })
            }
            _ => Err(CudaError::Unsuitable(format!(
                "an architecture must be sm_{} or newer, such as sm_90a, not {text:?}",
                Self::OLDEST
            ))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn architectures_are_written_as_nvrtc_has_them() {
        for (capability, name) in
            [(80, "sm_80"), (89, "sm_89"), (90, "sm_90a"), (100, "sm_100a"), (120, "sm_120")]
        {
            assert_eq!(Architecture::of_device(capability).to_string(), name);
            assert_eq!(name.parse(), Ok(Architecture::of_device(capability)));
        }
        for wrong in ["sm_75", "90", "sm_", "sm_a", "sm_9000", "compute_90"] {
            let error = wrong.parse::<Architecture>().expect_err("not an architecture");
            assert!(error.to_string().contains(wrong), "{error}");
        }
    }

    #[test]
    fn a_device_newer_than_nvrtc_gets_what_it_runs() {
        let nearest = |capability, known: &[u32]| {
            Architecture::nearest(capability, known.iter().copied()).map(|found| found.to_string())
        };
        let old = [75, 80, 86, 87, 90, 100, 101, 120];
        for (capability, name) in [
            (80, "sm_80"),
            (87, "sm_87"),
            (89, "sm_86"),
            (90, "sm_90a"),
            (100, "sm_100a"),
            (103, "sm_100"),
            (121, "sm_120"),
        ] {
            assert_eq!(nearest(capability, &old).as_deref(), Some(name));
        }
        assert_eq!(nearest(110, &old), None);
        assert_eq!(nearest(82, &[75, 86, 89]), None);
        assert_eq!(nearest(103, &[100, 103]).as_deref(), Some("sm_103a"));
    }
}
