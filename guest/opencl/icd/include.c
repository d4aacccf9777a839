/* Files that programs include. The application may read them, the executor may not: it is confined, has another
 * user, another working folder, and perhaps another host. So their text goes with the build. */
#include "gx.h"
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

/* The paths have to fit into one request. */
enum { MOST_FILES = 512, MOST_BYTES = 16 << 20, MOST_PATH = 4096, MOST_PATHS = GX_MAX_REQUEST / 2 };

/* place is a folder or a file: as the application finds it, which may lead through links or through folders that it
 * may not read, and absolute, which is where it lies for the executor. */
struct place { char *real, *path; };
struct file { struct place at; char *text; size_t len; };

struct search {
	struct place dirs[257]; /* the working folder, and those of -I */
	uint32_t ndirs, nfiles;
	size_t bytes, paths;
	char cwd[MOST_PATH];
	struct file files[MOST_FILES];
};

/* absolute makes dir/name without dots and without doubled slashes. It does not ask the file system. */
static char *absolute(const char *dir, const char *name, size_t n)
{
	size_t d = n && name[0] == '/' ? 0 : strlen(dir), at = 0;
	char *in = malloc(d + n + 3), *out = malloc(d + n + 3);
	if (!in || !out || d + n + 3 > MOST_PATH) {
		free(in);
		free(out);
		return NULL;
	}
	memcpy(in, dir, d);
	in[d] = '/';
	memcpy(in + d + 1, name, n);
	in[d + 1 + n] = 0;
	for (char *save, *part = strtok_r(in, "/", &save); part; part = strtok_r(NULL, "/", &save)) {
		if (!strcmp(part, "."))
			continue;
		if (!strcmp(part, "..")) {
			while (at && out[--at] != '/')
				;
			continue;
		}
		out[at++] = '/';
		size_t len = strlen(part);
		memcpy(out + at, part, len);
		at += len;
	}
	if (!at)
		out[at++] = '/';
	out[at] = 0;
	free(in);
	return out;
}

static bool blank(char c) { return c == ' ' || c == '\t' || c == '\n' || c == '\r' || c == '\v' || c == '\f'; }

/* word takes the next word of the options, without its quotes. */
static bool word(const char **at, char *out)
{
	const char *p = *at;
	size_t n = 0;
	while (blank(*p))
		p++;
	if (!*p)
		return false;
	for (bool quoted = false; *p && (quoted || !blank(*p)); p++)
		if (*p == '"')
			quoted = !quoted;
		else if (n < MOST_PATH - 1)
			out[n++] = *p;
	out[n] = 0;
	*at = p;
	return true;
}

static void drop_place(struct place *p)
{
	free(p->real);
	free(p->path);
}

/* at finds the place with that name in a folder. */
static bool at(struct place *p, const struct place *dir, const char *name, size_t n)
{
	size_t d = n && name[0] == '/' ? 0 : strlen(dir->real);
	p->path = absolute(dir->path, name, n);
	p->real = malloc(d + n + 2);
	if (p->path && p->real && d + n + 2 <= MOST_PATH) {
		memcpy(p->real, dir->real, d);
		if (d)
			p->real[d++] = '/';
		memcpy(p->real + d, name, n);
		p->real[d + n] = 0;
		return true;
	}
	drop_place(p);
	return false;
}

static void find_dirs(struct search *s, const char *options)
{
	char w[MOST_PATH + 2];
	struct place cwd = {".", s->cwd};
	s->ndirs = at(&s->dirs[0], &cwd, "", 0);
	while (options && word(&options, w)) {
		if (strncmp(w, "-I", 2))
			continue;
		if (!w[2] && !word(&options, w + 2))
			return;
		if (s->ndirs < COUNT(s->dirs) && at(&s->dirs[s->ndirs], &cwd, w + 2, strlen(w + 2)))
			s->ndirs++;
	}
}

/* look reads a file if there is one that is new. It returns false if there is one for which there is no room. */
static bool look(struct search *s, const struct place *dir, const char *name, size_t n)
{
	struct place p;
	if (!at(&p, dir, name, n))
		return true;
	for (uint32_t i = 0; i < s->nfiles; i++)
		if (!strcmp(s->files[i].at.path, p.path)) {
			drop_place(&p);
			return true;
		}
	struct stat st;
	int fd = open(p.real, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
	bool is = fd >= 0 && !fstat(fd, &st) && S_ISREG(st.st_mode);
	char *text = NULL;
	size_t len = 0;
	if (is && s->nfiles < MOST_FILES && s->paths + strlen(p.path) + 2 < MOST_PATHS && (uint64_t)st.st_size < MOST_BYTES - s->bytes &&
		(text = malloc((size_t)st.st_size + 1))) {
		for (ssize_t got = 1; got > 0 && len < (size_t)st.st_size; len += got > 0 ? (size_t)got : 0)
			got = read(fd, text + len, (size_t)st.st_size - len);
		text[len++] = '\n'; /* no program is empty */
		s->files[s->nfiles++] = (struct file){p, text, len};
		s->bytes += len;
		s->paths += strlen(p.path) + 2;
	} else
		drop_place(&p);
	if (fd >= 0)
		close(fd);
	return !is || text;
}

/* find looks for what a directive names, with its quotes, wherever a compiler may: which of them it takes depends on the
 * compiler and on the directive. dir is that of the text's own file, NULL if it has none. */
static void find(struct search *s, const char *p, const char *end, const struct place *dir)
{
	char close = p < end && *p == '"' ? '"' : p < end && *p == '<' ? '>' : 0;
	const char *name = p + 1, *stop = close ? name : end;
	while (stop < end && *stop != close && *stop != '\n')
		stop++;
	size_t n = (size_t)(stop - name);
	if (stop >= end || *stop != close || !n || n >= MOST_PATH || *name == '/')
		return;
	bool room = close == '>' || !dir || look(s, dir, name, n);
	for (uint32_t i = 0; room && i < s->ndirs; i++) /* a file further on would be taken for one that did not go along */
		room = look(s, &s->dirs[i], name, n);
}

/* skip leaves out blanks, comments and the ends of lines that go on, and with lines all ends of lines. */
static const char *skip(const char *p, const char *end, bool lines)
{
	while (p < end) {
		size_t left = (size_t)(end - p);
		if (blank(*p) && (lines || *p != '\n'))
			p++;
		else if (left > 1 && !memcmp(p, "\\\n", 2))
			p += 2;
		else if (left > 2 && !memcmp(p, "\\\r\n", 3))
			p += 3;
		else if (left > 1 && !memcmp(p, "/*", 2)) {
			const char *stop = memmem(p + 2, left - 2, "*/", 2);
			p = stop ? stop + 2 : end;
		} else
			break;
	}
	return p;
}

/* scan looks for what a text includes. What is in a comment, or left out by #if, does no harm. dir is as in find. */
static void scan(struct search *s, const char *text, size_t len, const struct place *dir)
{
	static const char *const words[] = {"include_next", "include", "import"};
	const char *end = text + len, *p = text;
	if (len > 3 && !memcmp(p, "\xef\xbb\xbf", 3)) /* as editors put it */
		p += 3;
	for (; p < end; p++) {
		p = skip(p, end, true);
		if (p < end && *p == '#') {
			p = skip(p + 1, end, false);
			for (unsigned i = 0; i < COUNT(words); i++) {
				size_t n = strlen(words[i]);
				if ((size_t)(end - p) > n && !memcmp(p, words[i], n)) {
					p = skip(p + n, end, false);
					find(s, p, end, dir);
					break;
				}
			}
		}
		while (p < end && *p != '\n')
			p++;
	}
	static const char has[] = "__has_include"; /* and __has_include_next */
	for (p = text; (p = memmem(p, (size_t)(end - p), has, sizeof has - 1));) {
		while (p < end && *p != '(' && *p != '\n')
			p++;
		if (p < end && *p == '(')
			find(s, skip(p + 1, end, false), end, dir);
	}
}

/* send makes a program of each file. */
static cl_int send_files(cl_program p, const struct search *s, struct gx_files *f)
{
	size_t bytes = s->paths + strlen(s->cwd) + 1;
	f->programs = calloc(s->nfiles, sizeof *f->programs);
	f->ids = calloc(s->nfiles, sizeof *f->ids);
	char *at = f->names = malloc(bytes);
	if (!f->programs || !f->ids || !f->names)
		return CL_OUT_OF_HOST_MEMORY;
	for (uint32_t i = 0; i < s->nfiles; i++) {
		cl_int err;
		f->programs[i] = clCreateProgramWithSource(p->ctx, 1, (const char **)&s->files[i].text, &s->files[i].len, &err);
		if (err)
			return err;
		f->n = i + 1;
		f->ids[i] = f->programs[i]->o.id;
		*at++ = '/'; /* two slashes: no header of clCompileProgram */
		at = stpcpy(at, s->files[i].at.path) + 1;
	}
	strcpy(at, s->cwd);
	f->nnames = (uint32_t)bytes;
	return CL_SUCCESS;
}

cl_int gx_files_find(cl_program p, const char *options, cl_uint nheaders, const cl_program *headers, struct gx_files *f)
{
	*f = (struct gx_files){0};
	bool any = false;
	for (cl_uint i = 0; i <= nheaders; i++) {
		cl_program x = i ? headers[i - 1] : p;
		any |= x->source && (memmem(x->source, x->nsource, "include", 7) || memmem(x->source, x->nsource, "import", 6));
	}
	if (!p->source || !any)
		return CL_SUCCESS;
	struct search *s = calloc(1, sizeof *s);
	if (!s)
		return CL_OUT_OF_HOST_MEMORY;
	if (!getcwd(s->cwd, sizeof s->cwd) || *s->cwd != '/')
		strcpy(s->cwd, "/");
	find_dirs(s, options);
	scan(s, p->source, p->nsource - 1, NULL);
	for (cl_uint i = 0; i < nheaders; i++)
		if (headers[i]->source)
			scan(s, headers[i]->source, headers[i]->nsource - 1, NULL);
	for (uint32_t i = 0; i < s->nfiles; i++) { /* it grows */
		struct place at = s->files[i].at, dir;
		dir.real = strndup(at.real, (size_t)(strrchr(at.real, '/') - at.real));
		dir.path = strndup(at.path, (size_t)(strrchr(at.path, '/') - at.path));
		if (dir.real && dir.path)
			scan(s, s->files[i].text, s->files[i].len, &dir);
		drop_place(&dir);
	}
	cl_int err = s->nfiles ? send_files(p, s, f) : CL_SUCCESS;
	if (err)
		gx_files_drop(f);
	for (uint32_t i = 0; i < s->nfiles; i++) {
		drop_place(&s->files[i].at);
		free(s->files[i].text);
	}
	for (uint32_t i = 0; i < s->ndirs; i++)
		drop_place(&s->dirs[i]);
	free(s);
	return err;
}

void gx_files_drop(struct gx_files *f)
{
	for (uint32_t i = 0; i < f->n; i++)
		clReleaseProgram(f->programs[i]);
	free(f->programs);
	free(f->ids);
	free(f->names);
	*f = (struct gx_files){0};
}
