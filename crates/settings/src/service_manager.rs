//! What systemd is told about a service of `Type=notify`, by the protocol of `sd_notify(3)`: a datagram
//! to the socket that `NOTIFY_SOCKET` names.

use std::ffi::OsStr;
use std::io;
use std::os::linux::net::SocketAddrExt as _;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::net::{SocketAddr, UnixDatagram};

/// Tells the service manager that the program serves, with a line for `systemctl status`. Without a
/// service manager it does nothing.
pub fn tell_ready(status: &str) {
    let Some(socket) = std::env::var_os("NOTIFY_SOCKET") else { return };
    let status = status.replace('\n', " ");
    if let Err(error) = send(&socket, &format!("READY=1\nSTATUS={status}")) {
        // systemd ends a service that does not report in time, and this says why.
        tracing::warn!(%error, "the service manager cannot be told that the program is ready");
    }
}

/// Sends a message to a socket: a path, or with `@` an abstract name.
fn send(socket: &OsStr, message: &str) -> io::Result<()> {
    let address = match socket.as_bytes() {
        [b'@', name @ ..] => SocketAddr::from_abstract_name(name)?,
        _ => SocketAddr::from_pathname(socket)?,
    };
    UnixDatagram::unbound()?.send_to_addr(message.as_bytes(), &address)?;
    Ok(())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn received(socket: &UnixDatagram) -> String {
        let mut message = [0; 256];
        let length = socket.recv(&mut message).unwrap();
        String::from_utf8_lossy(&message[..length]).into_owned()
    }

    #[test]
    fn a_message_reaches_a_path_and_an_abstract_name() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("notify");
        let socket = UnixDatagram::bind(&path).unwrap();
        send(path.as_os_str(), "READY=1\nSTATUS=one").unwrap();
        assert_eq!(received(&socket), "READY=1\nSTATUS=one");
        let name = format!("splitrail-test-{}", std::process::id());
        let address = SocketAddr::from_abstract_name(&name).unwrap();
        let socket = UnixDatagram::bind_addr(&address).unwrap();
        send(OsStr::new(&format!("@{name}")), "READY=1\nSTATUS=two").unwrap();
        assert_eq!(received(&socket), "READY=1\nSTATUS=two");
        assert!(send(folder.path().join("nobody").as_os_str(), "READY=1").is_err());
    }
}
