// Package subid says whose a user number is. Whoever has a login may have 65536 more users, those of
// /etc/subuid(5), and take any of them in a user namespace. What is limited for each user is limited for
// all of them together.
//
// Not here: rights. A user that belongs to another one by /etc/subuid has its own rights and files.
package subid
