//! Relative links lead to files and headings that exist, on the built site too, and every page is in the table of contents.

use super::{pages, read, root, split};
use std::collections::BTreeMap;
use std::path::{Component, Path, PathBuf};

/// The anchor of a heading: lower case, spaces as hyphens, other punctuation gone.
fn anchor(heading: &str) -> String {
    let kept = heading.chars().filter(|c| c.is_alphanumeric() || "-_ ".contains(*c));
    kept.collect::<String>().trim().to_lowercase().replace(' ', "-")
}

/// Anchors of a page; a repeated heading has a number after it.
fn anchors(page: &str) -> Vec<String> {
    let mut seen: BTreeMap<String, usize> = BTreeMap::new();
    let (_, prose) = split(page);
    let headings = prose.lines().filter(|l| l.starts_with('#')).map(|l| anchor(l.trim_start_matches('#')));
    headings
        .map(|name| {
            let n = seen.entry(name.clone()).or_default();
            *n += 1;
            if *n == 1 { name } else { format!("{name}-{}", *n - 1) }
        })
        .collect()
}

/// Targets of the links in Markdown text, without those in code.
fn targets(text: &str) -> Vec<String> {
    let mut out = Vec::new();
    for line in text.lines() {
        // What is between backticks is no link.
        let plain: String = line.split('`').step_by(2).collect::<Vec<_>>().join("`");
        let links = plain.split("](").skip(1).filter_map(|rest| rest.split(')').next());
        out.extend(links.map(|target| target.split(' ').next().unwrap_or_default().to_string()));
    }
    out
}

/// `docs/../README.md` without the detour.
fn normal(path: &Path) -> PathBuf {
    let mut out = PathBuf::new();
    for part in path.components() {
        match part {
            Component::ParentDir => drop(out.pop()),
            other => out.push(other),
        }
    }
    out
}

#[test]
fn links_lead_to_files_and_headings_that_exist() {
    let (mut broken, mut checked) = (Vec::new(), 0);
    for page in pages() {
        for target in targets(&split(&page).1) {
            if target.contains("://") || target.starts_with("mailto:") {
                continue;
            }
            checked += 1;
            if page.starts_with("docs/") && target.split('/').any(|part| part == "..") {
                broken.push(format!("{page}: ({target}): the site holds pages of docs/ only"));
                continue;
            }
            let (file, heading) = target.split_once('#').unwrap_or((&target, ""));
            let folder = Path::new(&page).parent().unwrap();
            let to = if file.is_empty() { PathBuf::from(&page) } else { normal(&folder.join(file)) };
            let to = to.to_str().unwrap();
            if !root().join(to).exists() {
                broken.push(format!("{page}: ({target}): there is no {to}"));
            } else if !heading.is_empty() && !anchors(to).iter().any(|a| a == heading) {
                broken.push(format!("{page}: ({target}): {to} has no such heading"));
            }
        }
    }
    assert!(broken.is_empty(), "{}", broken.join("\n"));
    assert!(checked > 60, "only {checked} links were found");
}

#[test]
fn every_page_is_in_the_table_of_contents_once() {
    let mut listed = targets(&read("docs/SUMMARY.md"));
    listed.sort();
    let own = |page: &String| page.strip_prefix("docs/").filter(|p| *p != "SUMMARY.md").map(String::from);
    let expected: Vec<String> = pages().iter().filter_map(own).collect();
    assert_eq!(listed, expected);
}

#[test]
fn anchors_are_those_of_mdbook_and_github() {
    assert_eq!(anchor(" In-job restart"), "in-job-restart");
    assert_eq!(anchor(" The best checkpoint, and early stopping"), "the-best-checkpoint-and-early-stopping");
    assert_eq!(targets("a [b](c.md#d) `[x](y)` [e](f)"), ["c.md#d", "f"]);
}
