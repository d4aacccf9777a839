package access

import (
	"maps"

	clusterv1 "github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1"
	"github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1/clusterv1connect"
	"github.com/gpuctl/gpuctl/api/gpuctl/v1/gpuctlv1connect"
)

// Rule is who may call a procedure.
type Rule struct {
	Kinds Kind           // set of kinds
	Role  clusterv1.Role // least role; hosts and anonymous callers need none
	Audit bool           // whether the procedure changes something
}

// Of the tables below.
const (
	viewer   = clusterv1.Role_ROLE_VIEWER
	operator = clusterv1.Role_ROLE_OPERATOR
	admin    = clusterv1.Role_ROLE_ADMIN
	nobody   = clusterv1.Role_ROLE_UNSPECIFIED
	change   = true
)

// Table returns the rules of all procedures of the API.
func Table() map[string]Rule {
	all := clusterTable()
	maps.Copy(all, hostTable())
	maps.Copy(all, stepTable())
	return all
}

func clusterTable() map[string]Rule {
	return map[string]Rule{
		// Hosts read for their own callers.
		clusterv1connect.ClusterServiceListProcedure:     {Local | User | Host, viewer, false},
		clusterv1connect.ClusterServiceWatchProcedure:    {Local | User | Host, viewer, false},
		clusterv1connect.ClusterServiceDescribeProcedure: {Local | User | Host, viewer, false},
		clusterv1connect.ClusterServiceEventsProcedure:   {Local | User | Host, viewer, false},
		clusterv1connect.ClusterServiceTopProcedure:      {Local | User | Host, viewer, false},
		clusterv1connect.ClusterServiceStatusProcedure:   {Local | User | Host, viewer, false},
		clusterv1connect.ClusterServicePlaceProcedure:    {Local | User | Host, viewer, false},

		clusterv1connect.ClusterServiceCreateClaimProcedure: {Local | User, operator, change},
		clusterv1connect.ClusterServiceDeleteClaimProcedure: {Local | User, operator, change},
		clusterv1connect.ClusterServiceSetDrainProcedure:    {Local | User, operator, change},
		clusterv1connect.ClusterServiceSetCordonProcedure:   {Local | User, operator, change},
		clusterv1connect.ClusterServiceSetLabelsProcedure:   {Local | User, operator, change},
		clusterv1connect.ClusterServiceSetRankProcedure:     {Local | User, operator, change},
		clusterv1connect.ClusterServiceSetQueueProcedure:    {Local | User, admin, change},

		clusterv1connect.ClusterServiceCreateTokenProcedure:    {Local | User, admin, change},
		clusterv1connect.ClusterServiceListTokensProcedure:     {Local | User, admin, false},
		clusterv1connect.ClusterServiceDeleteTokenProcedure:    {Local | User, admin, change},
		clusterv1connect.ClusterServiceRemoveHostProcedure:     {Local | User, admin, change},
		clusterv1connect.ClusterServiceRevokeIdentityProcedure: {Local | User, admin, change},
		clusterv1connect.ClusterServiceListIdentitiesProcedure: {Local | User, admin, false},

		// These make this host a member, so they are for local callers only.
		clusterv1connect.ClusterServiceInitProcedure: {Local, admin, change},
		clusterv1connect.ClusterServiceJoinProcedure: {Local, admin, change},

		// The token decides. A caller with a certificate may use a token, too.
		clusterv1connect.PeerServiceEnrollProcedure: {Anonymous | Host | User, nobody, change},
		clusterv1connect.PeerServiceRenewProcedure:  {Host | User, viewer, change},
		// What a host does for its own caller is in the trail of that host, and in the
		// log with the caller's name.
		clusterv1connect.PeerServiceApplyProcedure:       {Host, nobody, false},
		clusterv1connect.PeerServiceReadIndexProcedure:   {Host, nobody, false},
		clusterv1connect.PeerServiceHeartbeatProcedure:   {Host, nobody, false},
		clusterv1connect.PeerServiceFactsProcedure:       {Host, nobody, false},
		clusterv1connect.PeerServiceCreateClaimProcedure: {Host, nobody, false},
		clusterv1connect.PeerServiceEchoProcedure:        {Host, nobody, false},
		// A lease lets another host's user compute here.
		clusterv1connect.PeerServiceLendProcedure:     {Host, nobody, change},
		clusterv1connect.PeerServiceEndLeaseProcedure: {Host, nobody, change},
		// Contents of the calling host's session go to another host.
		clusterv1connect.PeerServiceAllowFetchProcedure: {Host, nobody, change},
		clusterv1connect.PeerServiceEndFetchProcedure:   {Host, nobody, change},
		clusterv1connect.PeerServiceFetchProcedure:      {Host, nobody, change},
	}
}

func hostTable() map[string]Rule {
	return map[string]Rule{
		gpuctlv1connect.HostServiceGetInventoryProcedure:    {Local | User | Host, viewer, false},
		gpuctlv1connect.HostServiceListClaimsProcedure:      {Local | User | Host, viewer, false},
		gpuctlv1connect.HostServiceListSessionsProcedure:    {Local | User | Host, viewer, false},
		gpuctlv1connect.HostServiceWatchSessionsProcedure:   {Local | User | Host, viewer, false},
		gpuctlv1connect.HostServiceDescribeSessionProcedure: {Local | User | Host, viewer, false},
		// Plan may start the target executor, to build the programs there.
		gpuctlv1connect.HostServicePlanProcedure:         {Local, operator, false},
		gpuctlv1connect.HostServiceCreateClaimProcedure:  {Local, operator, change},
		gpuctlv1connect.HostServiceReleaseClaimProcedure: {Local, operator, change},
		gpuctlv1connect.HostServiceSwapProcedure:         {Local, operator, change},
		gpuctlv1connect.HostServiceSuspendProcedure:      {Local, operator, change},
		gpuctlv1connect.HostServiceResumeProcedure:       {Local, operator, change},
		gpuctlv1connect.HostServiceAdoptProcedure:        {Local, operator, change},

		// Hosts forward calls of their own callers.
		gpuctlv1connect.DeviceServiceListCardsProcedure:    {Local | User | Host, viewer, false},
		gpuctlv1connect.DeviceServiceListMachinesProcedure: {Local | User | Host, viewer, false},
		gpuctlv1connect.DeviceServiceIsolationProcedure:    {Local | User | Host, viewer, false},
		gpuctlv1connect.DeviceServiceAttachProcedure:       {Local | User | Host, operator, change},
		gpuctlv1connect.DeviceServiceDetachProcedure:       {Local | User | Host, operator, change},
		gpuctlv1connect.DeviceServiceAttachRemoteProcedure: {Local | User | Host, operator, change},
		gpuctlv1connect.DeviceServiceDetachRemoteProcedure: {Local | User | Host, operator, change},
		gpuctlv1connect.DeviceServiceServeProcedure:        {Local | User | Host, operator, change},
		gpuctlv1connect.DeviceServiceEndServeProcedure:     {Local | User | Host, operator, change},
		gpuctlv1connect.DeviceServiceResetProcedure:        {Local | User | Host, operator, change},
		gpuctlv1connect.DeviceServiceResizeProcedure:       {Local | User | Host, operator, change},
		gpuctlv1connect.DeviceServiceListNICsProcedure:     {Local | User | Host, viewer, false},

		gpuctlv1connect.MigrationServicePlanProcedure:   {Local | User | Host, viewer, false},
		gpuctlv1connect.MigrationServiceWatchProcedure:  {Local | User | Host, viewer, false},
		gpuctlv1connect.MigrationServiceStartProcedure:  {Local | User | Host, operator, change},
		gpuctlv1connect.MigrationServiceAbortProcedure:  {Local | User | Host, operator, change},
		gpuctlv1connect.MigrationServiceResumeProcedure: {Local | User | Host, operator, change},
		// The caller's host asks the VM's.
		gpuctlv1connect.MigrationServiceRehearseProcedure: {Local | User | Host, operator, change},
	}
}

// stepTable is of the steps of migrations: only their drivers, which are hosts, call them.
func stepTable() map[string]Rule {
	return map[string]Rule{
		gpuctlv1connect.SiteServiceMachineFactsProcedure: {Host, nobody, false},
		gpuctlv1connect.SiteServiceHostFactsProcedure:    {Host, nobody, false},
		gpuctlv1connect.SiteServiceWhereProcedure:        {Host, nobody, false},
		gpuctlv1connect.SiteServiceSessionsProcedure:     {Host, nobody, false},
		gpuctlv1connect.SiteServiceLostProcedure:         {Host, nobody, false},
		gpuctlv1connect.SiteServiceReserveProcedure:      {Host, nobody, change},
		gpuctlv1connect.SiteServicePrepareProcedure:      {Host, nobody, change},
		gpuctlv1connect.SiteServiceExpectProcedure:       {Host, nobody, change},
		gpuctlv1connect.SiteServiceAttachProcedure:       {Host, nobody, change},
		gpuctlv1connect.SiteServiceDetachProcedure:       {Host, nobody, change},
		gpuctlv1connect.SiteServiceGiveBackProcedure:     {Host, nobody, change},
		gpuctlv1connect.SiteServiceMoveProcedure:         {Host, nobody, change},
		gpuctlv1connect.SiteServiceFreezeProcedure:       {Host, nobody, change},
		gpuctlv1connect.SiteServiceReleaseProcedure:      {Host, nobody, change},
		gpuctlv1connect.SiteServiceTakeUpProcedure:       {Host, nobody, change},
		gpuctlv1connect.SiteServiceAwaitProcedure:        {Host, nobody, change},
		gpuctlv1connect.SiteServiceThawProcedure:         {Host, nobody, change},
		gpuctlv1connect.SiteServiceServesProcedure:       {Host, nobody, false},
		gpuctlv1connect.SiteServiceDefinitionProcedure:   {Host, nobody, false},
		gpuctlv1connect.SiteServiceDefineProcedure:       {Host, nobody, change},
		gpuctlv1connect.SiteServiceUndefineProcedure:     {Host, nobody, change},
		gpuctlv1connect.SiteServicePauseProcedure:        {Host, nobody, change},
		gpuctlv1connect.SiteServiceUnpauseProcedure:      {Host, nobody, change},
		gpuctlv1connect.SiteServiceStopProcedure:         {Host, nobody, change},
		gpuctlv1connect.SiteServiceStartProcedure:        {Host, nobody, change},
		// States of VMs: the two hosts in a migration's record send them to each other.
		// No call returns a state to a host that asks for it.
		gpuctlv1connect.SiteServiceKeepProcedure:    {Host, nobody, change},
		gpuctlv1connect.SiteServiceDepositProcedure: {Host, nobody, change},
		gpuctlv1connect.SiteServiceForgetProcedure:  {Host, nobody, change},
		// Remote GPUs of VMs.
		gpuctlv1connect.SiteServiceReachProcedure:   {Host, nobody, false},
		gpuctlv1connect.SiteServiceLendProcedure:    {Host, nobody, change},
		gpuctlv1connect.SiteServiceEndLendProcedure: {Host, nobody, change},
		gpuctlv1connect.SiteServiceFollowProcedure:  {Host, nobody, change},
		gpuctlv1connect.SiteServiceLeaseProcedure:   {Host, nobody, change},
		gpuctlv1connect.SiteServiceSwapProcedure:    {Host, nobody, change},
		gpuctlv1connect.SiteServiceHomeProcedure:    {Host, nobody, change},
		// Parts of mediated GPUs of VMs. The contents go to the host to which the VM has moved.
		gpuctlv1connect.SiteServiceParkPartsProcedure:    {Host, nobody, change},
		gpuctlv1connect.SiteServiceExpectPartsProcedure:  {Host, nobody, change},
		gpuctlv1connect.SiteServiceTakePartsProcedure:    {Host, nobody, change},
		gpuctlv1connect.SiteServiceDropPartsProcedure:    {Host, nobody, change},
		gpuctlv1connect.SiteServicePartContentsProcedure: {Host, nobody, change},
		gpuctlv1connect.SiteServiceGivePartProcedure:     {Host, nobody, change},
	}
}
