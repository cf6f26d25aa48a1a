//! The embedded sources of the kernels.

use super::sampling;

/// A translation unit: what NVRTC compiles at once.
#[derive(Debug)]
pub struct Unit {
    /// The file's name without its ending.
    pub name: &'static str,
    /// Its text.
    pub source: &'static str,
    /// The kernels in it.
    pub entries: &'static [&'static str],
}

macro_rules! kernels {
    ($file:literal) => {
        include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/../cuda/kernels/", $file))
    };
}

/// The headers that units include, by name.
pub const HEADERS: &[(&str, &str)] = &[
    ("device.cuh", kernels!("device.cuh")),
    ("gated_delta.cuh", kernels!("gated_delta.cuh")),
    ("gated_delta_entries.cuh", kernels!("gated_delta_entries.cuh")),
    ("delta_carry.cuh", kernels!("delta_carry.cuh")),
    ("delta_inputs.cuh", kernels!("delta_inputs.cuh")),
    ("delta_rows.cuh", kernels!("delta_rows.cuh")),
    ("async_copy.cuh", kernels!("async_copy.cuh")),
    ("attention.cuh", kernels!("attention.cuh")),
    ("attention_args.cuh", kernels!("attention_args.cuh")),
    ("attention_merge.cuh", kernels!("attention_merge.cuh")),
    ("attention_products.cuh", kernels!("attention_products.cuh")),
    ("online_softmax.cuh", kernels!("online_softmax.cuh")),
    ("reach.cuh", kernels!("reach.cuh")),
    ("warp_matrix.cuh", kernels!("warp_matrix.cuh")),
    ("planted.cuh", kernels!("planted.cuh")),
    ("philox.cuh", kernels!("philox.cuh")),
    ("rows.cuh", kernels!("rows.cuh")),
    ("weights.cuh", kernels!("weights.cuh")),
    ("edits.cuh", kernels!("edits.cuh")),
    ("cut.cuh", kernels!("cut.cuh")),
    ("law.cuh", kernels!("law.cuh")),
    ("judge.cuh", kernels!("judge.cuh")),
    ("chain.cuh", kernels!("chain.cuh")),
];

/// Every unit.
pub const UNITS: &[Unit] = &[
    Unit { name: "probe", source: kernels!("probe.cu"), entries: &["probe"] },
    Unit {
        name: "attention_f32",
        source: kernels!("attention_f32.cu"),
        entries: &[
            "attend_f32_d16",
            "merge_f32_d16",
            "attend_f32_d64",
            "merge_f32_d64",
            "attend_f32_d128",
            "merge_f32_d128",
            "attend_f32_d256",
            "merge_f32_d256",
        ],
    },
    Unit {
        name: "attention_f16",
        source: kernels!("attention_f16.cu"),
        entries: &[
            "attend_f16_d16",
            "merge_f16_d16",
            "attend_f16_d64",
            "merge_f16_d64",
            "attend_f16_d128",
            "merge_f16_d128",
            "attend_f16_d256",
            "merge_f16_d256",
        ],
    },
    Unit {
        name: "attention_bf16",
        source: kernels!("attention_bf16.cu"),
        entries: &[
            "attend_bf16_d16",
            "merge_bf16_d16",
            "attend_bf16_d64",
            "merge_bf16_d64",
            "attend_bf16_d128",
            "merge_bf16_d128",
            "attend_bf16_d256",
            "merge_bf16_d256",
        ],
    },
    Unit {
        name: "gated_delta_f32",
        source: kernels!("gated_delta_f32.cu"),
        entries: &["delta_rows_f32_r4", "delta_rows_f32_r8", "delta_rows_f32_r16", "delta_carry_f32"],
    },
    Unit {
        name: "gated_delta_f16",
        source: kernels!("gated_delta_f16.cu"),
        entries: &["delta_rows_f16_r4", "delta_rows_f16_r8", "delta_rows_f16_r16", "delta_carry_f16"],
    },
    Unit {
        name: "gated_delta_bf16",
        source: kernels!("gated_delta_bf16.cu"),
        entries: &["delta_rows_bf16_r4", "delta_rows_bf16_r8", "delta_rows_bf16_r16", "delta_carry_bf16"],
    },
    Unit { name: "sampling", source: kernels!("sampling.cu"), entries: sampling::VERIFY_ENTRIES },
    Unit { name: "chain", source: kernels!("chain.cu"), entries: sampling::CHAIN_ENTRIES },
];

/// The unit that has this entry, and the entry's name in it.
pub fn unit_of(entry: &str) -> Option<(&'static Unit, &'static str)> {
    UNITS.iter().find_map(|unit| unit.entries.iter().find(|name| **name == entry).map(|name| (unit, *name)))
}

/// The unit of this name.
pub fn unit(name: &str) -> Option<&'static Unit> {
    UNITS.iter().find(|unit| unit.name == name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_name_belongs_to_one_kernel() {
        let mut names: Vec<_> = UNITS.iter().flat_map(|unit| unit.entries).collect();
        let all = names.len();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), all);
        assert_eq!(unit_of("probe").map(|(unit, entry)| (unit.name, entry)), Some(("probe", "probe")));
        assert!(unit_of("prob").is_none() && unit("probe").is_some() && unit("").is_none());
    }

    #[test]
    fn every_include_is_embedded() {
        let texts = UNITS.iter().map(|unit| unit.source).chain(HEADERS.iter().map(|header| header.1));
        for line in texts.flat_map(str::lines) {
            let Some(name) = line.strip_prefix("#include \"").and_then(|rest| rest.strip_suffix('"')) else {
                continue;
            };
            let host = name.starts_with("../emulate/");
            assert!(host || HEADERS.iter().any(|header| header.0 == name), "{name} is not among the headers");
        }
    }
}
