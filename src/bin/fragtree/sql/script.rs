//! Cutting text into statements, where the SQL tokenizer sees a semicolon: not in a string, a quoted
//! name or a comment.

use datafusion::sql::sqlparser::dialect::Dialect;
use datafusion::sql::sqlparser::tokenizer::{Location, Token, Tokenizer, Whitespace};

/// The statements of `text`, without those that hold nothing but space and comments. Text that cannot
/// be tokenized stays in one piece, for the parser to complain about.
pub(crate) fn split<'a>(text: &'a str, dialect: &dyn Dialect) -> Vec<&'a str> {
    let Ok(tokens) = Tokenizer::new(dialect, text).tokenize_with_location() else {
        return vec![text];
    };
    let offsets = Offsets::new(text);
    let mut statements = Vec::new();
    let (mut start, mut substance) = (0, false);
    for token in &tokens {
        if token.token == Token::SemiColon {
            let end = offsets.of(token.span.start);
            if substance {
                statements.extend(text.get(start..end));
            }
            (start, substance) = (end + 1, false);
        } else {
            substance |= !matches!(token.token, Token::Whitespace(_) | Token::EOF);
        }
    }
    if substance {
        statements.extend(text.get(start..));
    }
    statements
}

/// Whether the last thing in `text`, comments and space aside, is a semicolon that ends a statement.
pub(crate) fn is_complete(text: &str, dialect: &dyn Dialect) -> bool {
    let Ok(tokens) = Tokenizer::new(dialect, text).tokenize_with_location() else {
        return false;
    };
    let last = tokens.iter().rev().map(|t| &t.token).find(|t| {
        !matches!(
            t,
            Token::EOF
                | Token::Whitespace(
                    Whitespace::Space
                        | Whitespace::Newline
                        | Whitespace::Tab
                        | Whitespace::SingleLineComment { .. }
                        | Whitespace::MultiLineComment(_)
                )
        )
    });
    last == Some(&Token::SemiColon)
}

/// The text after a first line that names an interpreter.
pub(crate) fn without_shebang(text: &str) -> &str {
    if text.starts_with("#!") {
        text.split_once('\n').map_or("", |(_, rest)| rest)
    } else {
        text
    }
}

/// From the tokenizer's lines and columns, which count characters, to bytes.
struct Offsets<'a> {
    text: &'a str,
    lines: Vec<usize>,
}

impl<'a> Offsets<'a> {
    fn new(text: &'a str) -> Self {
        let ends = text.match_indices('\n').map(|(i, _)| i + 1);
        Self {
            text,
            lines: std::iter::once(0).chain(ends).collect(),
        }
    }

    fn of(&self, location: Location) -> usize {
        let index = |n: u64| usize::try_from(n).unwrap_or(usize::MAX).saturating_sub(1);
        let start = self
            .lines
            .get(index(location.line))
            .copied()
            .unwrap_or(self.text.len());
        let line = self.text.get(start..).unwrap_or_default();
        let within = line
            .char_indices()
            .nth(index(location.column))
            .map_or(line.len(), |(i, _)| i);
        start + within
    }
}

#[cfg(test)]
mod tests {
    use datafusion::sql::sqlparser::dialect::GenericDialect;

    use super::*;

    fn pieces(text: &str) -> Vec<&str> {
        split(text, &GenericDialect {})
            .into_iter()
            .map(str::trim)
            .collect()
    }

    #[test]
    fn cuts_only_at_the_end_of_statements() {
        assert_eq!(pieces("SELECT 1; SELECT 2"), ["SELECT 1", "SELECT 2"]);
        assert_eq!(
            pieces("SELECT ';' AS \"a;b\" -- no; end\n;SELECT 2;"),
            ["SELECT ';' AS \"a;b\" -- no; end", "SELECT 2"]
        );
        assert_eq!(
            pieces("/* a; b */ SELECT 'it''s;'\n;"),
            ["/* a; b */ SELECT 'it''s;'"]
        );
    }

    #[test]
    fn counts_characters_and_not_bytes() {
        assert_eq!(
            pieces("SELECT '表é';\nSELECT '😀' AS x;SELECT 3"),
            ["SELECT '表é'", "SELECT '😀' AS x", "SELECT 3"]
        );
    }

    #[test]
    fn drops_pieces_without_a_statement() {
        assert!(pieces(" ;; -- nothing\n /* here; */ ;").is_empty());
        assert_eq!(pieces("SELECT 'open"), ["SELECT 'open"]);
    }

    #[test]
    fn knows_when_a_statement_ends() {
        let complete = |text| is_complete(text, &GenericDialect {});
        assert!(complete("SELECT 1;"));
        assert!(complete("SELECT 1; -- done\n"));
        assert!(!complete("SELECT 1 -- done;"));
        assert!(!complete("SELECT ';"));
        assert!(!complete(""));
    }

    #[test]
    fn skips_the_interpreter_line() {
        assert_eq!(without_shebang("#!/usr/bin/env x\nSELECT 1"), "SELECT 1");
        assert_eq!(without_shebang("SELECT 1"), "SELECT 1");
    }
}
