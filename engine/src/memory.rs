//! Memory of this machine.

/// Memory of this machine, within the limit of this process's container if it has one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Memory {
    /// All of it, in bytes.
    pub total_bytes: u64,
    /// What can be taken without swapping, in bytes.
    pub available_bytes: u64,
}

impl Memory {
    /// Looks how much there is now.
    #[must_use]
    pub fn look() -> Self {
        let mut system = sysinfo::System::new();
        system.refresh_memory();
        let (total_bytes, available_bytes) = (system.total_memory(), system.available_memory());
        match system.cgroup_limits() {
            // File pages of the container make way, so only what else it has taken counts.
            Some(limits) => Self {
                total_bytes: total_bytes.min(limits.total_memory),
                available_bytes: available_bytes
                    .min(limits.total_memory.saturating_sub(limits.rss)),
            },
            None => Self { total_bytes, available_bytes },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn some_memory_is_there() {
        let Memory { total_bytes, available_bytes } = Memory::look();
        assert!(available_bytes > 0 && available_bytes <= total_bytes);
    }
}
