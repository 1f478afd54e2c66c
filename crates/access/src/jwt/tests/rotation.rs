//! Keys change while tokens are verified.

use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use splitrail_config::jwks::KeySet;

use super::support::{NOW, Signer, acme, claims, jwks, verifier};
use crate::jwt::JwtRefusal;

#[test]
fn a_key_in_all_sets_is_always_accepted_while_others_come_and_go() {
    let [first, lasting, last] = [Signer::ed("first"), Signer::ec("lasting"), Signer::ed("last")];
    let verifier = verifier(&[&first, &lasting]);
    let sets = [[&first, &lasting], [&lasting, &last]].map(|signers| jwks(&signers));
    let [first, lasting, last] = [&first, &lasting, &last].map(|signer| signer.token(&claims()));
    let is_over = AtomicBool::new(false);
    let verify = || {
        let mut seen = [0_u64; 2];
        while !is_over.load(Relaxed) || seen.contains(&0) {
            assert_eq!(verifier.verify(&lasting, NOW), Ok(acme()));
            for token in [&first, &last] {
                match verifier.verify(token, NOW) {
                    Ok(claims) => seen[0] += u64::from(claims == acme()),
                    Err(refusal) => {
                        assert_eq!(refusal, JwtRefusal::UnknownKey);
                        seen[1] += 1;
                    }
                }
            }
        }
    };
    std::thread::scope(|scope| {
        let verifying = [scope.spawn(verify), scope.spawn(verify)];
        for turn in 1..=300 {
            assert!(verifier.keys.replace(KeySet::parse(&sets[turn % 2]).unwrap()));
            std::thread::yield_now();
        }
        is_over.store(true, Relaxed);
        verifying.into_iter().for_each(|thread| thread.join().unwrap());
    });
    // The last set is the first one.
    assert_eq!(verifier.verify(&first, NOW), Ok(acme()));
    assert_eq!(verifier.verify(&last, NOW), Err(JwtRefusal::UnknownKey));
}

#[test]
fn a_remembered_token_is_forgotten_with_its_key() {
    let (old, new) = (Signer::ed("old"), Signer::ed("new"));
    let verifier = verifier(&[&old, &new]);
    let token = old.token(&claims());
    for _ in 0..2 {
        assert_eq!(verifier.verify(&token, NOW), Ok(acme()));
    }
    let set = |signers: &[&Signer]| KeySet::parse(&jwks(signers)).unwrap();
    assert!(!verifier.keys.replace(set(&[&old, &new])), "the same keys are no change");
    assert_eq!(verifier.verify(&token, NOW), Ok(acme()));
    assert!(verifier.keys.replace(set(&[&new])));
    assert_eq!(verifier.verify(&token, NOW), Err(JwtRefusal::UnknownKey));
    // A key of the same name does not bring the token back.
    assert!(verifier.keys.replace(set(&[&Signer::ed("old")])));
    assert_eq!(verifier.verify(&token, NOW), Err(JwtRefusal::Signature));
}
