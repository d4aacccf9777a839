// Package celenv reads and evaluates CEL expressions of people who are not
// trusted: filters over objects and claims' wishes.
//
// CEL bounds an evaluation by its cost, but adds the cost of a call after the
// call, and takes most calls for cheap ones. So what could be dear in a single
// call is not in the language here, and the rest is counted by sizes:
//
//   - Functions are those of a list. Those whose results grow out of proportion
//     (replace, join, format, split) are not in it.
//   - Values are scalars, and lists and maps of scalars. A list in a list can be
//     shared by reference and then hold 2^n elements for n characters.
//   - Lists are not added to each other, for the same reason.
//   - Patterns are constants, and small when compiled.
//   - Texts longer than any of an object's end the evaluation.
//
// An evaluation ends with its context, too.
package celenv
