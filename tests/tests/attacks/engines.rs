//! Engines that misbehave on the wire: late bytes, unsolicited answers, endless heads, oversized
//! replies, redirects and hand-offs to foreign hosts.
