//! What the system says of a process, and does to it.

use std::process::Command;
use std::time::Duration;

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

/// Resets the peak of the process's memory.
pub fn reset_peak(pid: u32) {
    // 5 means the peak; proc_pid_clear_refs(5).
    std::fs::write(format!("/proc/{pid}/clear_refs"), "5").expect("a peak to reset");
}

/// Processor time of the threads that a process has now, to the nanosecond.
pub fn processor_time(pid: u32) -> Duration {
    let threads = std::fs::read_dir(format!("/proc/{pid}/task")).expect("its threads");
    let of_thread = |thread: std::io::Result<std::fs::DirEntry>| {
        // A thread may end between the two reads. The first figure is nanoseconds on a processor;
        // sched-stats of the kernel's documentation.
        let text = std::fs::read_to_string(thread.ok()?.path().join("schedstat")).ok()?;
        text.split_whitespace().next()?.parse::<u64>().ok()
    };
    Duration::from_nanos(threads.filter_map(of_thread).sum())
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
