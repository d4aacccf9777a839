package state

import (
	clusterv1 "github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1"
)

// Name returns the name that is unique among the objects of its kind. It is empty for
// nil.
func Name(o *clusterv1.Object) string {
	switch o := o.GetObject().(type) {
	case *clusterv1.Object_Host:
		return o.Host.GetName()
	case *clusterv1.Object_Gpu:
		return o.Gpu.GetId()
	case *clusterv1.Object_Model:
		return o.Model.GetName()
	case *clusterv1.Object_Vgpu:
		return o.Vgpu.GetId()
	case *clusterv1.Object_Claim:
		return o.Claim.GetId()
	case *clusterv1.Object_Assignment:
		return o.Assignment.GetId()
	case *clusterv1.Object_Session:
		return o.Session.GetId()
	case *clusterv1.Object_Migration:
		return o.Migration.GetId()
	case *clusterv1.Object_Reservation:
		return o.Reservation.GetId()
	case *clusterv1.Object_Link:
		return o.Link.GetId()
	}
	return ""
}

// Revision returns the index of the entry that changed an object last.
func Revision(o *clusterv1.Object) uint64 {
	switch o := o.GetObject().(type) {
	case *clusterv1.Object_Host:
		return o.Host.GetRevision()
	case *clusterv1.Object_Gpu:
		return o.Gpu.GetRevision()
	case *clusterv1.Object_Model:
		return o.Model.GetRevision()
	case *clusterv1.Object_Vgpu:
		return o.Vgpu.GetRevision()
	case *clusterv1.Object_Claim:
		return o.Claim.GetRevision()
	case *clusterv1.Object_Assignment:
		return o.Assignment.GetRevision()
	case *clusterv1.Object_Session:
		return o.Session.GetRevision()
	case *clusterv1.Object_Migration:
		return o.Migration.GetRevision()
	case *clusterv1.Object_Reservation:
		return o.Reservation.GetRevision()
	case *clusterv1.Object_Link:
		return o.Link.GetRevision()
	}
	return 0
}

// KindOf returns the kind of an object.
func KindOf(o *clusterv1.Object) clusterv1.Kind {
	switch o.GetObject().(type) {
	case *clusterv1.Object_Host:
		return clusterv1.Kind_KIND_HOST
	case *clusterv1.Object_Gpu:
		return clusterv1.Kind_KIND_GPU
	case *clusterv1.Object_Model:
		return clusterv1.Kind_KIND_MODEL
	case *clusterv1.Object_Vgpu:
		return clusterv1.Kind_KIND_VGPU
	case *clusterv1.Object_Claim:
		return clusterv1.Kind_KIND_CLAIM
	case *clusterv1.Object_Assignment:
		return clusterv1.Kind_KIND_ASSIGNMENT
	case *clusterv1.Object_Session:
		return clusterv1.Kind_KIND_SESSION
	case *clusterv1.Object_Migration:
		return clusterv1.Kind_KIND_MIGRATION
	case *clusterv1.Object_Reservation:
		return clusterv1.Kind_KIND_RESERVATION
	case *clusterv1.Object_Link:
		return kindLink
	}
	return clusterv1.Kind_KIND_UNSPECIFIED
}

// wrap makes an Object of a table's value; nil if it is not a value of a kind.
func wrap(value any) *clusterv1.Object {
	switch x := value.(type) {
	case *clusterv1.Host:
		return &clusterv1.Object{Object: &clusterv1.Object_Host{Host: x}}
	case *clusterv1.GPU:
		return &clusterv1.Object{Object: &clusterv1.Object_Gpu{Gpu: x}}
	case *clusterv1.Model:
		return &clusterv1.Object{Object: &clusterv1.Object_Model{Model: x}}
	case *clusterv1.VGPU:
		return &clusterv1.Object{Object: &clusterv1.Object_Vgpu{Vgpu: x}}
	case *clusterv1.Claim:
		return &clusterv1.Object{Object: &clusterv1.Object_Claim{Claim: x}}
	case *clusterv1.Assignment:
		return &clusterv1.Object{Object: &clusterv1.Object_Assignment{Assignment: x}}
	case *clusterv1.Session:
		return &clusterv1.Object{Object: &clusterv1.Object_Session{Session: x}}
	case *clusterv1.Migration:
		return &clusterv1.Object{Object: &clusterv1.Object_Migration{Migration: x}}
	case *clusterv1.Reservation:
		return &clusterv1.Object{Object: &clusterv1.Object_Reservation{Reservation: x}}
	case *clusterv1.Link:
		return &clusterv1.Object{Object: &clusterv1.Object_Link{Link: x}}
	}
	return nil
}

// Stored returns the message in an object. It is the same pointer in all views in which
// the object has not changed. It returns nil if there is none.
func Stored(o *clusterv1.Object) any {
	switch o := o.GetObject().(type) {
	case *clusterv1.Object_Host:
		return o.Host
	case *clusterv1.Object_Gpu:
		return o.Gpu
	case *clusterv1.Object_Model:
		return o.Model
	case *clusterv1.Object_Vgpu:
		return o.Vgpu
	case *clusterv1.Object_Claim:
		return o.Claim
	case *clusterv1.Object_Assignment:
		return o.Assignment
	case *clusterv1.Object_Session:
		return o.Session
	case *clusterv1.Object_Migration:
		return o.Migration
	case *clusterv1.Object_Reservation:
		return o.Reservation
	case *clusterv1.Object_Link:
		return o.Link
	}
	return nil
}

// Ways in which a GPU is given away: the values of GPU.kinds.
const (
	KindPassthrough = "passthrough" // the whole card to a VM
	KindSlice       = "slice"       // a part of the card, made by its hardware or driver, to a VM
	KindRemote      = "remote"      // to applications, through its runtime
	KindMediated    = "mediated"    // a part of a software GPU to a VM, whose accesses the host traps
)
