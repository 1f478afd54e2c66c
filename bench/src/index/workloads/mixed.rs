use super::super::run::Run;
use std::io;
pub(super) fn run(_run: &mut Run) -> io::Result<()> {
    Ok(())
}
