use super::*;
use proptest::prelude::*;

fn strings(list: &[&str], keep: bool) -> StopStrings {
    StopStrings::new(list.iter().map(|s| s.to_string()).collect(), keep)
}

fn given(text: &str, stop: Option<&str>) -> StopMatch {
    StopMatch { text: text.into(), stop: stop.map(Into::into) }
}

#[test]
fn ids_end_a_request_as_end_tokens_or_as_its_own() {
    let stops = StopIds::new(&[2, 900_000], &[7, 7, 2]);
    assert_eq!(stops.check(2), Some(StopHit::End));
    assert_eq!(stops.check(900_000), Some(StopHit::End));
    assert_eq!(stops.check(7), Some(StopHit::Token(7)));
    assert_eq!(stops.check(3), None);
    assert_eq!(stops.iter().collect::<Vec<_>>(), [2, 900_000, 7]);
    assert_eq!(StopIds::default().check(0), None);
}

#[test]
fn a_string_over_several_pieces_is_found_and_cut_out() {
    let mut stop = strings(&["\n\nEND"], false);
    assert_eq!(stop.push("text", true), given("text", None));
    assert_eq!(stop.push(".\n", true), given(".", None));
    assert_eq!(stop.push("\nE", true), given("", None));
    assert_eq!(stop.push("ND and more", true), given("", Some("\n\nEND")));
    assert_eq!(stop.push("more", true), given("", None));
    assert_eq!(stop.finish("more"), "");
}

#[test]
fn a_kept_string_stays_and_holds_nothing_back() {
    let mut stop = strings(&["END"], true);
    assert_eq!(stop.push("the EN", true), given("the EN", None));
    assert_eq!(stop.push("D, gone", true), given("D", Some("END")));
}

#[test]
fn the_earliest_end_wins_then_the_first_listed() {
    // "abcd" begins first, "c" ends first.
    assert_eq!(strings(&["abcd", "c"], false).push("xabcd", true), given("xab", Some("c")));
    assert_eq!(strings(&["bc", "abc"], false).push("xabc", true), given("xa", Some("bc")));
    assert_eq!(strings(&["abc", "bc"], false).push("xabc", true), given("x", Some("abc")));
}

#[test]
fn what_might_become_a_string_is_held_back_and_released() {
    let mut stop = strings(&["aab", "bx"], false);
    let shown: Vec<String> = ["a", "a", "a", "c", "b", "y"].iter().map(|p| stop.push(p, true).text).collect();
    // aaa: the last two may still become aab.
    assert_eq!(shown, ["", "", "a", "aac", "", "by"]);
    assert_eq!(stop.push("aa", true).text, "");
    assert_eq!(stop.finish("\u{fffd}"), "aa\u{fffd}");
}

#[test]
fn the_rest_is_matched_too() {
    let mut stop = strings(&["a\u{fffd}"], false);
    assert_eq!(stop.push("ba", true), given("b", None));
    assert_eq!(stop.finish("\u{fffd}c"), "");
    assert_eq!(stop.push("c", true), given("", None));
    let mut stop = strings(&["a\u{fffd}"], true);
    assert_eq!(stop.push("ba", true), given("ba", None));
    assert_eq!(stop.finish("\u{fffd}c"), "\u{fffd}");
}

#[test]
fn a_string_completed_too_early_does_not_count() {
    let mut stop = strings(&["aba"], false);
    assert_eq!(stop.push("aba", false), given("ab", None));
    // Its last a is the first a of the next one.
    assert_eq!(stop.push("ba", true), given("", Some("aba")));
    // All strings read the byte at which one is completed too early.
    let mut stop = strings(&["ab", "bc"], false);
    assert_eq!(stop.push("ab", false), given("a", None));
    assert_eq!(stop.push("c", true), given("", Some("bc")));
}

#[test]
fn characters_are_never_split() {
    let mut stop = strings(&["\u{1F979}"], false);
    assert_eq!(stop.push("ein \u{1FAE0}", true).text, "ein \u{1FAE0}");
    assert_eq!(stop.push("\u{9F9C}", true).text, "\u{9F9C}");
    assert_eq!(stop.push(" \u{1F979} e\u{301}", true), given(" ", Some("\u{1F979}")));
}

#[test]
fn nothing_to_look_for_holds_nothing_back() {
    assert_eq!(strings(&[], false).push("abc", true), given("abc", None));
    assert_eq!(strings(&[""], false).push("abc", true), given("abc", None));
}

/// The whole text at once: the match with the earliest end, then the first listed.
fn reference(text: &str, list: &[String]) -> Option<(usize, usize)> {
    (0..=text.len()).find_map(|end| {
        let index = list.iter().position(|s| text.as_bytes()[..end].ends_with(s.as_bytes()))?;
        Some((index, end))
    })
}

/// The part that must be shown: the rest might be the beginning of a string.
fn certain<'a>(text: &'a str, list: &[String]) -> &'a str {
    let may_grow = |at: usize| list.iter().any(|s| s.len() > text.len() - at && s.starts_with(&text[at..]));
    let at = (0..text.len()).find(|&at| text.is_char_boundary(at) && may_grow(at));
    &text[..at.unwrap_or(text.len())]
}

proptest! {
    /// Few letters, so that strings overlap themselves and each other; one of them two bytes wide.
    #[test]
    fn pieces_give_what_the_whole_text_gives(
        pieces in prop::collection::vec("[ab\u{e9}]{0,4}", 0..12),
        list in prop::collection::vec("[ab\u{e9}]{1,5}", 1..4),
        keep: bool
    ) {
        let mut stop = StopStrings::new(list.clone(), keep);
        let (mut read, mut shown) = (String::new(), String::new());
        for piece in &pieces {
            read += piece;
            let found = stop.push(piece, true);
            shown += &found.text;
            if let Some((index, end)) = reference(&read, &list) {
                prop_assert_eq!(found.stop.as_ref(), Some(&list[index]));
                prop_assert_eq!(shown, &read[..if keep { end } else { end - list[index].len() }]);
                return Ok(());
            }
            prop_assert_eq!(found.stop, None);
            prop_assert_eq!(&shown, if keep { &read } else { certain(&read, &list) });
        }
        prop_assert_eq!(shown + &stop.finish("."), read + ".");
    }
}
