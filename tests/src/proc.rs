//! What the system says of a process, and does to it.

use std::process::Command;

/// Memory that a process has at present, and at most had, in KiB.
#[derive(Clone, Copy, Debug)]
pub struct Memory {
    /// Resident now.
    pub now_kib: u64,
    /// The most that was resident since the last [`reset_peak`], or ever.
    pub peak_kib: u64,
}

/// The memory of a process.
pub fn memory(pid: u32) -> Memory {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).expect("a status");
    let figure = |key: &str| {
        let line = status.lines().find(|line| line.starts_with(key)).expect("a line");
        line.split_whitespace().nth(1).and_then(|kib| kib.parse().ok()).expect("a figure")
    };
    Memory { now_kib: figure("VmRSS:"), peak_kib: figure("VmHWM:") }
}

/// From now on, the peak is counted anew.
pub fn reset_peak(pid: u32) {
    // 5 means the peak; proc_pid_clear_refs(5).
    std::fs::write(format!("/proc/{pid}/clear_refs"), "5").expect("a peak to reset");
}

/// Processor time that a process has had, in ticks of 10 ms.
pub fn processor_ticks(pid: u32) -> u64 {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).expect("a state");
    // The name before may have any character in it; proc_pid_stat(5).
    let fields = stat.rsplit(')').next().expect("fields behind the name").split_whitespace();
    fields.skip(11).take(2).filter_map(|field| field.parse::<u64>().ok()).sum()
}

/// Files and sockets that a process has open.
pub fn open_files(pid: u32) -> usize {
    std::fs::read_dir(format!("/proc/{pid}/fd")).expect("its files").count()
}

/// Sends a process a signal, named as `kill` names it.
pub fn signal(pid: u32, name: &str) {
    let sent = Command::new("sh").args(["-c", &format!("kill -{name} {pid}")]).status();
    assert!(sent.expect("a shell").success(), "signal {name} to {pid}");
}
