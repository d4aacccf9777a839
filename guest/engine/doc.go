// Package engine has what engines of sessions share. An engine serves sessions of one kind:
// guest/session those of OpenCL, which can go to any model, and guest/cuda those of
// processes that NVIDIA's driver suspends and restores.
//
// Here live: the runner of an operation's steps with undo and commit, how long an operation
// goes on and how it ends, injected faults, the reporter of progress, the repetition of what
// could not be undone, a target's refusal, the lock of a run folder, the stream of
// sessions for those who watch, which sessions were lost, and what is offered, and which errors say nothing of what was looked at.
// What a step does, and the journal of a session, are the engine's. The server that has
// several engines is guest/service.
package engine
