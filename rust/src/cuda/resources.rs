//! Reads registers and memory from the assembler's log.

/// What an entry uses, according to the assembler.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Resources {
    /// The kernel.
    pub entry: String,
    /// Registers of a thread.
    pub registers: u32,
    /// Bytes that are stored to and loaded from local memory because registers ran out.
    pub spills: u32,
    /// Bytes of local memory of a thread.
    pub stack: u32,
    /// Bytes of static shared memory of a block.
    pub shared: u32,
}

/// Reads what the assembler says about each entry.
pub(super) fn read_log(log: &str) -> Vec<Resources> {
    let mut found: Vec<Resources> = Vec::new();
    let mut of_entry = false;
    for line in log.lines() {
        if let Some((_, rest)) = line.split_once("Compiling entry function '") {
            let entry = rest.split('\'').next().unwrap_or_default().to_string();
            found.push(Resources { entry, registers: 0, spills: 0, stack: 0, shared: 0 });
        }
        if let Some((_, name)) = line.split_once("Function properties for ") {
            of_entry = found.last().is_some_and(|last| last.entry == name.trim());
        }
        let Some(last) = found.last_mut().filter(|_| of_entry) else { continue };
        let number = |before: &str| {
            let (words, _) = line.split_once(before)?;
            words.split_whitespace().next_back()?.trim_start_matches(',').parse::<u32>().ok()
        };
        if let (Some(stack), Some(stores), Some(loads)) =
            (number(" bytes stack frame"), number(" bytes spill stores"), number(" bytes spill loads"))
        {
            (last.stack, last.spills) = (stack, stores + loads);
        }
        if let Some(registers) = number(" registers") {
            (last.registers, last.shared) = (registers, number(" bytes smem").unwrap_or(0));
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_log_says_what_entries_use() {
        let log = "ptxas info    : 0 bytes gmem\n\
            ptxas info    : Compiling entry function 'first' for 'sm_80'\n\
            ptxas info    : Function properties for first\n    \
            8 bytes stack frame, 4 bytes spill stores, 12 bytes spill loads\n\
            ptxas info    : Used 40 registers, used 1 barriers, 8 bytes cumulative stack size, 512 bytes smem, 376 bytes cmem[0]\n\
            ptxas info    : Function properties for helper\n    \
            64 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads\n\
            ptxas info    : Compiling entry function 'second' for 'sm_80'\n\
            ptxas info    : Function properties for second\n    \
            0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads\n\
            ptxas info    : Used 12 registers, used 0 barriers\n";
        let expected = [("first", 40, 16, 8, 512), ("second", 12, 0, 0, 0)].map(
            |(entry, registers, spills, stack, shared)| Resources {
                entry: entry.to_string(),
                registers,
                spills,
                stack,
                shared,
            },
        );
        assert_eq!(read_log(log), expected);
    }
}
