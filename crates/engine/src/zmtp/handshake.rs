//! The start of a connection: greetings, then a READY command from each side.

use bytes::Buf;

use super::{Connection, Role, WireError, frame};

const GREETING_BYTES: usize = 64;

/// Version 3.0 with the mechanism NULL. Peers with a later version fall back to it.
const GREETING: [u8; GREETING_BYTES] = {
    let mut greeting = [0; GREETING_BYTES];
    greeting[0] = 0xff;
    greeting[9] = 0x7f;
    greeting[10] = 3;
    greeting[12] = b'N';
    greeting[13] = b'U';
    greeting[14] = b'L';
    greeting[15] = b'L';
    greeting
};

pub(super) async fn run(connection: &mut Connection, role: Role) -> Result<(), WireError> {
    let mut hello = GREETING.to_vec();
    frame::encode_command(&ready(role), &mut hello);
    connection.stream.write_all(&hello).await?;

    while connection.buffer.len() < GREETING_BYTES {
        connection.fill().await?;
    }
    check_greeting(&connection.buffer[..GREETING_BYTES])?;
    connection.buffer.advance(GREETING_BYTES);

    let (header, body) = loop {
        match connection.frame()? {
            Some(frame) => break frame,
            None => connection.fill().await?,
        }
    };
    let properties = body
        .strip_prefix(b"\x05READY")
        .filter(|_| header.is_command)
        .ok_or(WireError::Handshake("its READY command is missing"))?;
    let (expected, fitting): (_, &[&[u8]]) = match role {
        Role::Sub => ("PUB", &[b"PUB", b"XPUB"]),
        Role::Dealer => ("ROUTER", &[b"ROUTER"]),
    };
    if socket_type(properties).is_some_and(|socket| fitting.contains(&socket)) {
        Ok(())
    } else {
        Err(WireError::WrongSocket { expected })
    }
}

fn ready(role: Role) -> Vec<u8> {
    let socket: &[u8] = match role {
        Role::Sub => b"SUB",
        Role::Dealer => b"DEALER",
    };
    let length = (socket.len() as u32).to_be_bytes();
    [b"\x05READY\x0bSocket-Type", &length[..], socket].concat()
}

fn check_greeting(greeting: &[u8]) -> Result<(), WireError> {
    if greeting[0] != 0xff || greeting[9] & 1 == 0 {
        return Err(WireError::Handshake("its first bytes are not a greeting"));
    }
    if greeting[10] < 3 {
        return Err(WireError::Handshake("its version is older"));
    }
    if greeting[12..32] != GREETING[12..32] {
        return Err(WireError::Handshake("its mechanism is not NULL"));
    }
    Ok(())
}

/// The `Socket-Type` among the properties of a READY command. Each property is a name with a length
/// of one byte and a value with a length of four bytes.
fn socket_type(mut properties: &[u8]) -> Option<&[u8]> {
    loop {
        let (name_bytes, rest) = properties.split_first()?;
        let (name, rest) = rest.split_at_checked(usize::from(*name_bytes))?;
        let (value_bytes, rest) = rest.split_first_chunk()?;
        let value_bytes = usize::try_from(u32::from_be_bytes(*value_bytes)).ok()?;
        let (value, rest) = rest.split_at_checked(value_bytes)?;
        if name.eq_ignore_ascii_case(b"Socket-Type") {
            return Some(value);
        }
        properties = rest;
    }
}
