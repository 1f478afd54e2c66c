//! Child processes of the measured programs, their processor time and their memory.

use std::fs;
use std::fs::File;
use std::net::{SocketAddr, TcpListener};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::sync_channel;
use std::thread;
use std::time::Duration;

use rustix::param::clock_ticks_per_second;
use rustix::process::{Pid, Resource, Rlimit, Signal, getrlimit, kill_process, setrlimit};

use super::Failure;

/// Maximum number of ports that are tried.
const PORTS_TRIED: usize = 100;

/// The variable that `release/build` sets when it records an execution profile. A process writes
/// the profile when it ends by itself, and not when it is killed.
const PROFILE_VARIABLE: &str = "LLVM_PROFILE_FILE";
/// Maximum time for a process to end by itself.
const END_TIMEOUT: Duration = Duration::from_secs(10);

/// A child process. Dropping it kills it.
pub(crate) struct Process {
    child: Child,
    name: String,
}

impl Process {
    /// Starts a program. `logs` is its `RUST_LOG`; its log is the file `NAME.log` in a folder.
    ///
    /// # Errors
    /// The program cannot be started, usually because it has not been built.
    pub(crate) fn start(
        program: &Path,
        name: &str,
        folder: &Path,
        args: &[&str],
        logs: &str,
    ) -> Result<Self, Failure> {
        Self::start_in(program, name, folder, args, &[("RUST_LOG", logs)])
    }

    /// Starts a program. The variables are added to its environment; its log is the file `NAME.log`
    /// in a folder, and its output `NAME.out`.
    ///
    /// # Errors
    /// The program cannot be started, usually because it has not been built.
    pub(crate) fn start_in(
        program: &Path,
        name: &str,
        folder: &Path,
        args: &[&str],
        variables: &[(&str, &str)],
    ) -> Result<Self, Failure> {
        let log = File::create(folder.join(format!("{name}.log")))?;
        let output = File::create(folder.join(format!("{name}.out")))?;
        let child = Command::new(program)
            .args(args)
            .envs(variables.iter().copied())
            .stdin(Stdio::null())
            .stdout(output)
            .stderr(log)
            .spawn();
        let child = child.map_err(|error| {
            let hint = "`cargo build --release` in the root folder builds it";
            format!("{}: {error}; {hint}", program.display())
        })?;
        Ok(Self { child, name: name.to_owned() })
    }

    /// Sends SIGKILL and waits for the end of the process.
    pub(crate) fn kill(&mut self) {
        // The process may have ended by itself.
        let _ended = self.child.kill();
        let _ended = self.child.wait();
    }

    /// Sends SIGTERM and waits for the end of the process. After [`END_TIMEOUT`], sends SIGKILL.
    fn terminate(&mut self) {
        let Some(id) = i32::try_from(self.child.id()).ok().and_then(Pid::from_raw) else { return };
        let is_running = matches!(self.child.try_wait(), Ok(None));
        if !is_running || kill_process(id, Signal::TERM).is_err() {
            return;
        }
        let child = &mut self.child;
        let (sender, ended) = sync_channel(1);
        thread::scope(|scope| {
            scope.spawn(move || {
                // The exit status is not needed.
                let _status = child.wait();
                // The receiver lives until the thread has ended.
                let _sent = sender.send(());
            });
            if ended.recv_timeout(END_TIMEOUT).is_err() {
                // The process may have ended by itself.
                let _ended = kill_process(id, Signal::KILL);
            }
        });
    }

    /// Checks that the process is running.
    ///
    /// # Errors
    /// The process has ended; the message contains its log.
    pub(crate) fn check(&mut self, folder: &Path) -> Result<(), Failure> {
        let Some(status) = self.child.try_wait()? else { return Ok(()) };
        let log = fs::read_to_string(folder.join(format!("{}.log", self.name)));
        Err(format!("{} has ended: {status}\n{}", self.name, log.unwrap_or_default()).into())
    }

    /// Processor time of all threads of the process so far.
    ///
    /// # Errors
    /// The process does not exist any more, or `/proc` cannot be read.
    pub(crate) fn cpu(&self) -> Result<Duration, Failure> {
        cpu_of(&self.child.id().to_string())
    }

    /// The ids of the process and of its child processes.
    ///
    /// # Errors
    /// The process does not exist any more, or `/proc` cannot be read.
    pub(crate) fn ids(&self) -> Result<Vec<u32>, Failure> {
        let id = self.child.id();
        let children = fs::read_to_string(format!("/proc/{id}/task/{id}/children"))?;
        let children = children.split_whitespace().filter_map(|child| child.parse().ok());
        Ok(std::iter::once(id).chain(children).collect())
    }

    /// Current resident memory of the process and its child processes, in MB (10^6 bytes).
    ///
    /// # Errors
    /// The process does not exist any more, or `/proc` cannot be read.
    pub(crate) fn resident_mb_with_children(&self) -> Result<f64, Failure> {
        self.ids()?.into_iter().map(|id| resident_mb_of(id, Resident::Now)).sum()
    }

    /// Resident memory of the process in MB (10^6 bytes).
    ///
    /// # Errors
    /// The process does not exist any more, or `/proc` cannot be read.
    pub(crate) fn resident_mb(&self, which: Resident) -> Result<f64, Failure> {
        resident_mb_of(self.child.id(), which)
    }
}

/// Processor time of a process so far, in user mode and in the kernel. `process` is a process id or
/// `self`.
///
/// # Errors
/// The process does not exist any more, or `/proc` cannot be read.
pub(crate) fn cpu_parts_of(process: &str) -> Result<(Duration, Duration), Failure> {
    let stat = fs::read_to_string(format!("/proc/{process}/stat"))?;
    // The program's name, in parentheses, may contain anything.
    let fields = stat.rsplit_once(')').ok_or("no name in /proc/PID/stat")?.1;
    let field = |at: usize| -> Result<u64, Failure> {
        Ok(fields.split_whitespace().nth(at).ok_or("too few fields in /proc/PID/stat")?.parse()?)
    };
    // `utime` and `stime`, fields 14 and 15 of proc(5); the first two fields are cut off.
    Ok((ticks(field(11)?), ticks(field(12)?)))
}

/// Processor time of all threads of a process so far. `process` is a process id or `self`.
///
/// # Errors
/// The process does not exist any more, or `/proc` cannot be read.
pub(crate) fn cpu_of(process: &str) -> Result<Duration, Failure> {
    let (user, system) = cpu_parts_of(process)?;
    Ok(user + system)
}

/// Processor time of the whole machine so far, without idle time.
///
/// # Errors
/// `/proc/stat` cannot be read.
pub(crate) fn cpu_of_all() -> Result<Duration, Failure> {
    let stat = fs::read_to_string("/proc/stat")?;
    let line = stat.lines().next().ok_or("/proc/stat is empty")?;
    let times: Vec<u64> = line.split_whitespace().filter_map(|time| time.parse().ok()).collect();
    // user, nice, system, (idle, iowait,) irq, softirq, steal.
    let busy = times.iter().enumerate().take(8).filter(|(at, _)| !matches!(at, 3 | 4));
    Ok(ticks(busy.map(|(_, time)| time).sum()))
}

fn ticks(count: u64) -> Duration {
    Duration::from_secs_f64(count as f64 / clock_ticks_per_second() as f64)
}

/// Resident memory of a process in MB (10^6 bytes).
///
/// # Errors
/// The process does not exist any more, or `/proc` cannot be read.
pub(crate) fn resident_mb_of(process: u32, which: Resident) -> Result<f64, Failure> {
    let key = match which {
        Resident::Peak => "VmHWM:",
        Resident::Now => "VmRSS:",
    };
    let status = fs::read_to_string(format!("/proc/{process}/status"))?;
    let line = status
        .lines()
        .find_map(|line| line.strip_prefix(key))
        .ok_or("no resident memory in /proc/PID/status")?;
    let kib: f64 =
        line.split_whitespace().next().ok_or("no resident memory in /proc/PID/status")?.parse()?;
    Ok(kib * 1024.0 / 1e6)
}

/// A figure of resident memory.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Resident {
    /// The maximum so far.
    Peak,
    /// The current value.
    Now,
}

impl Drop for Process {
    fn drop(&mut self) {
        if std::env::var_os(PROFILE_VARIABLE).is_some() {
            self.terminate();
        }
        self.kill();
    }
}

/// Finds free ports below the range of ports that the system gives to outgoing connections. While a
/// router is down, the connections that try to reach it must not occupy its ports.
///
/// # Errors
/// No free ports are found.
pub(crate) fn free_ports<const N: usize>() -> Result<[SocketAddr; N], Failure> {
    let any = || SocketAddr::from(([127, 0, 0, 1], rand::random_range(20_000..30_000)));
    let bound = (0..PORTS_TRIED).filter_map(|_| TcpListener::bind(any()).ok());
    let listeners: Vec<TcpListener> = bound.take(N).collect();
    let mut addresses = [SocketAddr::from(([127, 0, 0, 1], 0)); N];
    if listeners.len() < N {
        return Err("no free ports were found".into());
    }
    for (address, listener) in addresses.iter_mut().zip(&listeners) {
        *address = listener.local_addr()?;
    }
    Ok(addresses)
}

/// Raises the limit of open files to its maximum, for thousands of concurrent connections.
///
/// # Errors
/// The system refuses.
pub(crate) fn allow_many_files() -> Result<(), Failure> {
    let limit = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit })?;
    Ok(())
}

/// The load averages of the last 1, 5 and 15 minutes; empty if they cannot be read.
pub(crate) fn load_average() -> String {
    let text = fs::read_to_string("/proc/loadavg").unwrap_or_default();
    text.split_whitespace().take(3).collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn a_terminated_process_has_ended() {
        let folder = tempfile::tempdir().unwrap();
        let mut process =
            Process::start(Path::new("sleep"), "sleep", folder.path(), &["1000"], "").unwrap();
        process.check(folder.path()).unwrap();
        process.terminate();
        assert!(process.check(folder.path()).unwrap_err().to_string().contains("has ended"));
    }
}
