// Package celenv compiles and evaluates CEL expressions of users who are not trusted:
// filters over objects, and conditions of claims.
//
// CEL limits an evaluation by its cost. But it adds the cost of a call after the call,
// and assumes that most calls are cheap. So everything that could be expensive in a
// single call is not in this language, and the rest is counted by size:
//
//   - Only listed functions are permitted. Those whose results may be much larger than their arguments
//     (replace, join, format, split) are not in the list.
//   - Values are scalars, and lists and maps of scalars. A list in a list could be
//     shared by reference, and contain 2^n elements for n characters.
//   - Lists cannot be concatenated, for the same reason.
//   - Patterns are constants, and small when compiled.
//   - A text that is longer than any text of an object ends the evaluation.
//
// An evaluation also ends with its context.
package celenv
