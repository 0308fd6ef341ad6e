/* Puts each of PyTorch's tensors at the end of pages of its own, before one that cannot be read: what reads or writes
 * beyond a tensor ends the process, and memory that is given out holds the canary of tests/security/fuzzing.py.
 *
 *     cc -O2 -shared -fPIC -o guard_pages.so tests/security/guard_pages.c -ldl -lpthread
 *     python -m tests.security.fuzzing --calls 48000 --near --guard ./guard_pages.so
 */
#define _GNU_SOURCE
#include <sys/mman.h>
#include <stdint.h>
#include <stddef.h>
#include <errno.h>
#include <dlfcn.h>
#include <pthread.h>
#include <stdlib.h>
#define REGION (1UL<<40)
#define PAGE 4096UL
static char *base, *next_, *end_;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static void (*real_free)(void*);
static int (*real_pm)(void**, size_t, size_t);
static size_t live;
static uint32_t *pages; // number of pages of allocation that begins at this page, by page index (sparse mmap)
static unsigned rnd = 12345;
static void init(void){
  real_free = dlsym(RTLD_NEXT,"free"); real_pm = dlsym(RTLD_NEXT,"posix_memalign");
  base = mmap(0, REGION, PROT_NONE, MAP_PRIVATE|MAP_ANONYMOUS|MAP_NORESERVE, -1, 0);
  pages = mmap(0, (REGION/PAGE)*4, PROT_READ|PROT_WRITE, MAP_PRIVATE|MAP_ANONYMOUS|MAP_NORESERVE, -1, 0);
  if (base==MAP_FAILED||pages==MAP_FAILED) { base=0; return; }
  next_=base+PAGE; end_=base+REGION;
}
__attribute__((constructor)) static void ctor(void){ init(); }
int posix_memalign(void **out, size_t align, size_t size){
  if (!base || align != 64) return real_pm ? real_pm(out, align, size) : (init(), real_pm(out, align, size));
  if (size > (1UL<<30)) return ENOMEM;
  size_t n = (size + PAGE-1)/PAGE; if (!n) n=1;
  pthread_mutex_lock(&lock);
  if (live + n*PAGE > (2UL<<30) || next_ + (n+1)*PAGE >= end_) { pthread_mutex_unlock(&lock); return ENOMEM; }
  char *p = next_; next_ += (n+1)*PAGE; live += n*PAGE;
  rnd = rnd*1103515245u+12345u; int front = ((rnd>>16)&7)==0;
  pthread_mutex_unlock(&lock);
  if (mprotect(p, n*PAGE, PROT_READ|PROT_WRITE)) return ENOMEM;
  pages[(p-base)/PAGE]=n;
  if (size <= 65536) { uint64_t *w=(uint64_t*)p; for (size_t i=0;i<n*PAGE/8;i++) w[i]=0x5EC2E7BADC0FFEE1UL; }
  char *q = front ? p : p + n*PAGE - size;
  if (size==0) q = p;
  *out = q; return 0;
}
void free(void *ptr){
  char *c = ptr;
  if (base && c>=base && c<end_) {
    size_t i = (c-base)/PAGE; size_t n = pages[i];
    if (!n) abort();
    char *p = base + i*PAGE;
    madvise(p, n*PAGE, MADV_DONTNEED); mprotect(p, n*PAGE, PROT_NONE); pages[i]=0;
    pthread_mutex_lock(&lock); live -= n*PAGE; pthread_mutex_unlock(&lock);
    return;
  }
  if (!real_free) { real_free = dlsym(RTLD_NEXT,"free"); }
  real_free(ptr);
}
